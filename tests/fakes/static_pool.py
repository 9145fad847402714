"""Servers that neither join nor leave, in place of `ServerPool`: what would drop one of them raises."""

from __future__ import annotations

from typing import Any

from pipelinerl.errors import WeightSyncError


class StaticPool:
    """Args: `publisher` is connected with its servers already."""

    fresh: tuple[str, ...] = ()

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher

    def generations(self) -> dict[str, int]:
        return {}

    def is_first_start(self, name: str, generation: int | None) -> bool:
        return True

    def drop(self, name: str, generation: int | None, error: str) -> None:
        raise WeightSyncError(name, error)

    def wait_for_fresh(self, timeout_s: float) -> None:
        raise WeightSyncError("all servers", "none of them has the weights")
