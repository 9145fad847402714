"""How late an event loop is by its own doing. For tests that say that nothing holds it, on machines with other work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

_TICK_S = 0.01
_SCHEDULER = Path("/proc/thread-self/schedstat")


class LoopLag:
    """Measurements of one loop; what counts is the 99th percentile."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    @property
    def p99_s(self) -> float:
        """Seconds; 99 of 100 times the loop was at most so late."""
        return sorted(self._lags_s)[int(len(self._lags_s) * 0.99)]

    async def _watch(self) -> None:
        while True:
            before, queued_before_s = time.monotonic(), _queued_s()
            await asyncio.sleep(_TICK_S)
            self._lags_s.append(time.monotonic() - before - _TICK_S - (_queued_s() - queued_before_s))


@contextlib.asynccontextmanager
async def measured_lag() -> AsyncIterator[LoopLag]:
    """Measure the running loop while this is open."""
    lag = LoopLag()
    watcher = asyncio.create_task(lag._watch())
    try:
        yield lag
    finally:
        watcher.cancel()


def _queued_s() -> float:
    """How long this thread was ready to run, and others had the cores. 0 where the system does not say so."""
    try:
        return int(_SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
