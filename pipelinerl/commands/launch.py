"""`python -m pipelinerl launch`: the same as `python -m pipelinerl.launch`. Called by `pipelinerl.__main__`."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Start the run that `argv` describes; return its exit code."""
    from pipelinerl import launch

    return launch.main(argv)
