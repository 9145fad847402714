"""Stands for vLLM's engine core in tests of what the engine does at a weight update."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class FakeEngine:
    """Records what it is asked for. `is_busy`: steps are in progress, and `drain` ends them."""

    def __init__(self, is_busy: bool = False, failing: str = "") -> None:
        self.calls: list[Any] = []
        self.input_queue: SimpleQueue[Any] = SimpleQueue()
        self._is_busy, self._failing = is_busy, failing
        self._pauses: list[Future[None]] = []

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.calls.append(("pause", mode, clear_cache))
        if not self._is_busy:
            return None
        self._pauses.append(Future())
        return self._pauses[-1]

    def drain(self) -> None:
        # As vLLM does, the latest one first.
        while self._pauses:
            self._pauses.pop().set_result(None)

    def collective_rpc(self, method: str, kwargs: Any = None) -> None:
        self.calls.append(method if kwargs is None else (method, kwargs))
        if method == self._failing:
            raise RuntimeError("disk on fire")

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(("version", weight_version))

    def resume_scheduler(self) -> None:
        self.calls.append("resume")
