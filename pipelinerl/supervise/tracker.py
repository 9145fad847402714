"""What the supervised run shows and records of itself: a small seam in front of `pipelinerl.tracking`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipelinerl.config import RunConfig
from pipelinerl.streams.hub import StreamHub
from pipelinerl.supervise.identity import RunIdentity
from pipelinerl.supervise.run_dir import RunDir
from pipelinerl.world import WorldMap


class Tracker(Protocol):
    """Follows one run. Never raises for a metrics sink that fails."""

    def tick(self) -> None:
        """Show what is new; called about every two seconds."""
        ...

    def finish(self, status: str, reason: str | None, seconds: float) -> Mapping[str, Any]:
        """Write `summary.json` and the learning curve; return the summary."""
        ...


class SummaryOnly:
    """Writes how the run ended and nothing else."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def tick(self) -> None:
        return

    def finish(self, status: str, reason: str | None, seconds: float) -> Mapping[str, Any]:
        summary: dict[str, Any] = {"status": status, "reason": reason, "seconds": round(seconds, 3)}
        draft = self._file.with_name(f".{self._file.name}.draft")
        draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draft.replace(self._file)
        return summary


def open_tracker(config: RunConfig, world: WorldMap, run_dir: RunDir, hub: StreamHub, identity: RunIdentity) -> Tracker:
    """The tracker of this run."""
    return SummaryOnly(run_dir.summary_file)
