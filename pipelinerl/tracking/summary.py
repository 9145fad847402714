"""`summary.json`: what a run came to, as one small object with fixed keys.

Called by the collector when the run has ended, however it ended. Waits for nothing but the disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipelinerl.tracking.state import RunState

Status = Literal["completed", "failed", "interrupted"]


def build_summary(state: RunState, status: Status, reason: str | None) -> dict[str, Any]:
    """Return the summary. Rates are over the seconds of training; 0.0 where there was no training."""
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
    """Write `content`, indented, so that `path` is complete or as it was before.

    Raises:
        OSError: the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    os.replace(draft, path)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
