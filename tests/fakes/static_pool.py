"""Servers that neither join nor leave, in place of `ServerPool`: what would drop one of them raises."""

from __future__ import annotations

from typing import Any

from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.weight_sync import ServerPool


class StaticPool(ServerPool):
    """Args: `publisher` is connected with its servers already."""

    fresh = ()  # type: ignore[assignment]

    def __init__(self, publisher: Any) -> None:
        super().__init__(publisher, [], 0.0, lambda answer: None, 0)

    def is_present(self, name: str, generation: int) -> bool:
        return True

    def drop(self, name: str, generation: int, error: str) -> None:
        raise WeightSyncError(name, error)
