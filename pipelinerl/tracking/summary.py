"""What a run leaves when it ends: `summary.json` and `learning_curve.png`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipelinerl.rundir.durable import replace_file
from pipelinerl.tracking.state import REWARD, SUCCESS, RunState

Status = Literal["completed", "failed", "interrupted"]
_LAG = (("finetune/lag_mean_versions", "mean", "-"), ("finetune/lag_max_versions", "max", ":"))


def build_summary(state: RunState, status: Status, reason: str | None) -> dict[str, Any]:
    """Return the summary. Rates are per second of training; 0.0 without training."""
    seconds = state.training_seconds
    probes = state.probe_diffs
    return {
        "status": status,
        "reason": reason,
        "steps": state.steps,
        "samples_trained": state.lineage.num_samples,
        "weight_updates": state.weight_updates,
        "success_before": state.held_out_success("before"),
        "success_after": state.held_out_success("after"),
        "seconds": seconds,
        "samples_per_second": _rate(state.lineage.num_samples, seconds),
        "output_tokens_per_second": _rate(state.output_tokens, seconds),
        "mean_lag_versions": state.mean("finetune/lag_mean_versions", "finetune/output_tokens"),
        "max_lag_versions": int(max(state.history.get("finetune/lag_max_versions", {}).values(), default=0)),
        "multi_version_samples": int(state.total("finetune/multi_version_samples")),
        "stall_fraction": min(1.0, _rate(state.stall_seconds, seconds)),
        "logprob_abs_diff_mean": sum(probes) / len(probes) if probes else None,
        "fates": state.fates,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, indented and atomically. Raises OSError if it cannot be written."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class LearningCurve:
    """The data of `learning_curve.png`: reward, success and lags by step, and success of evaluations."""

    reward: dict[int, float]
    success: dict[int, float]
    lags: dict[str, list[tuple[int, float]]]
    held_out: dict[str, list[tuple[int, float]]]

    @classmethod
    def of(cls, state: RunState) -> LearningCurve:
        """A copy of the data in `state`."""
        lags = {name: sorted(state.history.get(name, {}).items()) for name, _, _ in _LAG}
        return cls(state.curve(REWARD), state.curve(SUCCESS), lags, _held_out(state))

    def __bool__(self) -> bool:
        return any((self.reward, self.success, self.held_out, *self.lags.values()))


def plot_learning_curve(shown: LearningCurve, path: Path, title: str) -> None:
    """Draw the run into `path` (PNG); without data the axes are empty. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    curve, lag = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    figure.suptitle(title)
    for values, label, color in ((shown.reward, "reward", "tab:blue"), (shown.success, "success", "tab:green")):
        if values:
            curve.plot(*zip(*values.items(), strict=True), label=f"{label}, training", color=color, linewidth=1.3)
    for index, (name, found) in enumerate(shown.held_out.items()):
        curve.plot(*zip(*found, strict=True), "o--", label=f"success, held out ({name})", color=f"C{index + 3}")
        for version, rate in found:
            curve.annotate(f"{rate:.2f}", (version, rate), textcoords="offset points", xytext=(0, 9), ha="center")
    for name, label, style in _LAG:
        if points := shown.lags[name]:
            lag.plot(*zip(*points, strict=True), style, label=label, color="tab:gray")
    curve.set_ylabel("success rate / reward")
    lag.set_ylabel("lag (versions)")
    lag.set_xlabel("policy version (optimizer steps)")
    for axes in (curve, lag):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _held_out(state: RunState) -> dict[str, list[tuple[int, float]]]:
    """(version, success rate) of the evaluations, by data set."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in state.evaluations:
        if result.success_rate is not None:
            points.setdefault(result.dataset_name, []).append((result.max_version, result.success_rate))
    return {name: sorted(found) for name, found in points.items()}
