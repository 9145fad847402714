"""`python -m pipelinerl audit RUN_DIR`: account for every sample of a run. Called by `pipelinerl.__main__`.

Works on finished, interrupted and running runs. Exit code 0: clean, 1: not clean, 2: not the directory of a run.
"""

from __future__ import annotations

import argparse

from pipelinerl.errors import EXIT_RUN_FAILED


def main(argv: list[str]) -> int:
    """Print the audit of the run that `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl audit",
        description="Prove from a run's streams that every sample ended in exactly one way: submitted = trained + "
        "filtered + stale + failed + pending. Prints goodput and compares the lengths of trained and lost samples.",
        epilog="Exit code 0: clean, 1: not clean, 2: not the directory of a run.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    # late: `--help` needs none of this
    import msgspec

    from pipelinerl.ledger.audit import audit_run
    from pipelinerl.ledger.text import render
    from pipelinerl.run.open_run import find_run

    report = audit_run(find_run(args.run_dir))
    if args.json:
        print(
            msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(report), "clean": report.is_clean})).decode()
        )
    else:
        print(render(report))
    return 0 if report.is_clean else EXIT_RUN_FAILED
