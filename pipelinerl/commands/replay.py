"""`python -m pipelinerl replay RUN_DIR`: train a run again from its recorded streams. Called by `pipelinerl.__main__`.

Starts no server. Writes nothing into the run.
"""

from __future__ import annotations

import argparse

from pipelinerl.errors import EXIT_RUN_FAILED


def main(argv: list[str]) -> int:
    """Replay the run that `argv` names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl replay",
        description="Rebuild every batch of a run from its recorded groups and train on them again, without servers. "
        "On a CPU with the plain backend and one trainer rank the training states come out bit by bit.",
        epilog="With --verify the exit code is 1 if something differs; 2: this run cannot be replayed.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument("--verify", action="store_true", help="say the first step that differs from the record")
    parser.add_argument("--steps", type=int, help="stop behind this step")
    args = parser.parse_args(argv)
    # late: `--help` needs none of this
    from pipelinerl.replay.run import replay_run
    from pipelinerl.run.open_run import find_run

    def show(step: int, values: dict[str, float]) -> None:
        loss, norm = values.get("finetune/loss", float("nan")), values["finetune/grad_norm"]
        print(f"step {step}: loss {loss:.6g}, gradient norm {norm:.6g}", flush=True)

    report = replay_run(find_run(args.run_dir), args.steps, show)
    states = ", ".join(map(str, report.checked_states)) or "none was kept"
    if report.first_difference is None:
        print(f"{report.steps} steps are equal to the record; training states compared bit by bit: {states}")
        return 0
    print(f"first difference: {report.first_difference} (training states that were compared: {states})")
    return EXIT_RUN_FAILED if args.verify else 0
