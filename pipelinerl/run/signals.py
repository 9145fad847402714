"""SIGINT, SIGTERM and SIGHUP of the launcher become events on its queue. Used as a context manager around the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from pipelinerl.run.process import Event, Interrupted

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_events(events: SimpleQueue[Event]) -> Iterator[list[int]]:
    """Put an `Interrupted` on `events` for each signal (a `SimpleQueue` may be filled from a signal handler).

    Yields the numbers of the signals that came so far: while a run ends, nobody may take them from `events`.
    """
    came: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        events.put(Interrupted(signum))

    # Under nohup SIGHUP is ignored, and stays so.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {signum: signal.signal(signum, handle) for signum in HANDLED if signum not in ignored}
    try:
        yield came
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
