"""The gate that rollouts pass when they start: the trainer closes it until the servers have new weights.

With `schedule=pipeline` it is never closed. All methods run on the event loop. `Scheduler` passes every training
rollout through it; it waits at a closed gate for the weight update. Rollouts that passed are never held up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RolloutGate:
    """Closed from a drain request until the update that it was made for.

    Args:
        on_drained: called with the version of the request once the gate is closed and nothing that passed still runs.
    """

    def __init__(self, on_drained: Callable[[int], None]) -> None:
        self._on_drained = on_drained
        self._opened = asyncio.Event()
        self._opened.set()
        self._closed_for: int | None = None
        self._answered = False
        self._running = 0

    @property
    def is_open(self) -> bool:
        return self._closed_for is None

    @property
    def running(self) -> int:
        """What passed the gate and has not ended."""
        return self._running

    async def wait_open(self) -> None:
        await self._opened.wait()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """What runs inside has passed; only for callers that found the gate open in the same turn of the loop."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._answer()

    def close(self, version: int) -> None:
        """Let nothing pass until `version` is served."""
        self._closed_for = version
        self._opened.clear()
        self._answered = False
        self._answer()

    def served(self, version: int) -> None:
        """The servers sample with `version`: open if that is what was waited for."""
        if self._closed_for is not None and version >= self._closed_for:
            self._closed_for = None
            self._opened.set()

    def _answer(self) -> None:
        if self._closed_for is not None and self._running == 0 and not self._answered:
            self._answered = True
            self._on_drained(self._closed_for)
