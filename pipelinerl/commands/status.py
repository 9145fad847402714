"""`python -m pipelinerl status RUN_DIR`: what every process of a run is doing. Called by `pipelinerl.__main__`.

Works from any terminal of the machine that the processes run on, on running and on ended runs.
"""

from __future__ import annotations

import argparse


def main(argv: list[str]) -> int:
    """Print the status of the run that `argv` names; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl status",
        description="Show every process of a run: alive or not, what it waits for and since when, its progress.",
        epilog="Exit code 0, also for a run that failed; 2: not the directory of a run.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    # late: `--help` needs none of this
    import msgspec
    from rich.console import Console

    from pipelinerl.run.open_run import find_run
    from pipelinerl.run.status import read_status
    from pipelinerl.run.status_text import print_status

    status = read_status(find_run(args.run_dir))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        print_status(status, Console(highlight=False))
    return 0
