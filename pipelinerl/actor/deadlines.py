"""Deadlines of many futures with one timer. Used by the worker pool, for every rollout.

To set and cancel a timer for each of them costs more than it looks. Waits for the earliest deadline.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Deadlines:
    """Futures that get the result None when their time is over. Of one event loop."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[float, asyncio.Future[Any]]] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def watch(self, key: int, answer: asyncio.Future[Any], timeout_s: float) -> None:
        """Give `answer` up in `timeout_s` seconds, unless it is done or forgotten by then."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        self._watched[key] = (ends, answer)
        if self._alarm is None or ends < self._alarm.when():
            self._set_alarm(ends)

    def forget(self, key: int) -> None:
        """Stop watching."""
        self._watched.pop(key, None)

    def close(self) -> None:
        """Forget everything."""
        self._watched.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(when, self._give_up_late)

    def _give_up_late(self) -> None:
        self._alarm = None
        now = asyncio.get_running_loop().time()
        for key, (ends, answer) in list(self._watched.items()):
            if ends <= now:
                del self._watched[key]
                if not answer.done():
                    answer.set_result(None)
        if self._watched:
            self._set_alarm(min(ends for ends, _ in self._watched.values()))
