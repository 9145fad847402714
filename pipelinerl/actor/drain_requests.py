"""Hears the trainer's requests to let rollouts end, and answers them. Used by the actor's loop.

With schedule=pipeline nobody asks, and it is not used. Waits for nothing: the stream is followed in a thread,
everything else happens on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from pipelinerl.actor.gate import RolloutGate
from pipelinerl.actor.trainer_state import TRAINER_INSTANCE
from pipelinerl.records.turns import Drained, DrainRequest
from pipelinerl.streams.base import TURNS_TOPIC, Entry, StreamWriter
from pipelinerl.streams.feed import Feed
from pipelinerl.streams.hub import StreamHub


def drain_answers(writer: StreamWriter[Drained], incarnation: int) -> Callable[[int], None]:
    """What a gate calls when nothing runs: it writes the answer."""

    def answer(version: int) -> None:
        writer.write(Drained(version=version, time=time.time(), incarnation=incarnation))
        writer.flush()

    return answer


@contextlib.contextmanager
def follow_drain_requests(
    hub: StreamHub, gate: RolloutGate, incarnation: int, on_failure: Callable[[BaseException], None]
) -> Iterator[None]:
    """Close `gate` at every request of this incarnation while the context is open.

    Args:
        on_failure: called on the event loop with what ended the thread, or kept the answer from being written.
    """
    loop = asyncio.get_running_loop()

    def take(version: int) -> None:
        try:
            gate.close(version)
        except Exception as error:  # noqa: BLE001 - a callback's error would only be logged; it ends the run
            on_failure(error)

    def listen(entry: Entry[DrainRequest]) -> None:
        if entry.record.incarnation == incarnation:
            loop.call_soon_threadsafe(take, entry.record.version)

    def fail(error: BaseException) -> None:
        loop.call_soon_threadsafe(on_failure, error)

    feed = Feed(hub.reader(TURNS_TOPIC, TRAINER_INSTANCE, DrainRequest), listen, "turns", fail).start()
    try:
        yield
    finally:
        feed.stop()
