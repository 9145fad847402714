"""The last words of a run in the terminal: how it ended, the numbers that matter, where the results are."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from pipelinerl.run.supervisor import Outcome
from pipelinerl.rundir.layout import RunDir, newest_training_state

_ROWS = (
    ("success before training", "success_before", "{:.3f}"),
    ("success after training", "success_after", "{:.3f}"),
    ("optimizer steps", "steps", "{}"),
    ("weight updates", "weight_updates", "{}"),
    ("samples trained", "samples_trained", "{}"),
    ("seconds", "seconds", "{:.0f}"),
    ("samples per second", "samples_per_second", "{:.1f}"),
    ("mean lag (versions)", "mean_lag_versions", "{:.2f}"),
)


def print_result(outcome: Outcome, summary: Mapping[str, Any], run_dir: RunDir) -> None:
    """Table and paths to stdout; the reason of a failure to stderr, with how to go on.

    A run without a step has no numbers: its reason is all there is to say.
    """
    console = Console(highlight=False, soft_wrap=True)
    has_results = bool(summary.get("steps") or summary.get("success_before") is not None)
    if has_results:
        _print_table(console, summary)
    for label, path in (
        ("summary", run_dir.summary_file),
        ("learning curve", run_dir.learning_curve_file),
        ("metrics", run_dir.metrics_file),
        ("model", run_dir.current_model),
        (_about_best(summary), run_dir.best_model),
    ):
        if path.exists() and (has_results or path != run_dir.learning_curve_file):
            console.print(f"{label}: {path}", markup=False)
    if outcome.status == "completed":
        console.print("training is complete", markup=False)
        return
    sys.stdout.flush()
    if outcome.status == "interrupted":
        sys.stderr.write(f"the run was interrupted: {outcome.reason}\n{_how_to_go_on(run_dir)}\n")
    else:
        sys.stderr.write(f"error: the run {outcome.status}: {outcome.reason}\n")


def _about_best(summary: Mapping[str, Any]) -> str:
    best = summary.get("best_model")
    if not best:
        return "best model"
    last = best["max_version"]
    span = "" if last == best["version"] else f" measured over versions {best['version']} to {last}"
    return f"best model (version {best['version']}, {best['metric']} {best['value']:g}{span})"


def _print_table(console: Console, summary: Mapping[str, Any]) -> None:
    table = Table(show_header=False)
    for label, key, pattern in _ROWS:
        if summary.get(key) is not None:
            table.add_row(label, pattern.format(summary[key]))
    console.print(table)


def _how_to_go_on(run_dir: RunDir) -> str:
    step = newest_training_state(run_dir)
    if step is None:
        return "The same command starts again at the first step: no training state was saved yet."
    return f"The same command, without force_restart, goes on behind step {step}, the newest training state."
