"""The last words of a run in the terminal: how it ended, the numbers that matter, where the results are."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from pipelinerl.supervise.run_dir import RunDir
from pipelinerl.supervise.supervisor import Outcome

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
    """Table and paths to stdout; the reason of a failure to stderr."""
    rows = [(label, pattern.format(summary[key])) for label, key, pattern in _ROWS if summary.get(key) is not None]
    console = Console(highlight=False, soft_wrap=True)
    if rows:
        table = Table(show_header=False)
        for label, value in rows:
            table.add_row(label, value)
        console.print(table)
    for label, path in (
        ("summary", run_dir.summary_file),
        ("learning curve", run_dir.learning_curve_file),
        ("metrics", run_dir.metrics_file),
        ("model", run_dir.current_model),
    ):
        if path.exists():
            console.print(f"{label}: {path}", markup=False)
    if outcome.status == "completed":
        console.print("training is complete", markup=False)
        return
    sys.stdout.flush()
    sys.stderr.write(f"error: the run {outcome.status}: {outcome.reason}\n")
