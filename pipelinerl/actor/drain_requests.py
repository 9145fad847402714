"""Hears the trainer's requests to let rollouts end, and answers them. Used by the actor's loop.

With schedule=pipeline nobody asks, and it is not used. Waits for nothing: the stream is followed in a thread,
everything else happens on the event loop. An answer waits for no group that is still to be written: a trainer that
waits for it may be what makes room for that group.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from pipelinerl.actor.gate import RolloutGate
from pipelinerl.actor.trainer_state import TRAINER_INSTANCE
from pipelinerl.records import PauseRequest, RolloutsPaused
from pipelinerl.streams.base import TURNS_TOPIC, Entry
from pipelinerl.streams.hub import LoopWriter, StreamHub
from pipelinerl.streams.read import Feed


class DrainAnswers:
    """Answers on their way to the stream. Owns `writer`."""

    def __init__(self, writer: LoopWriter[RolloutsPaused], incarnation: int) -> None:
        self._writer = writer
        self._incarnation = incarnation
        self._versions: asyncio.Queue[int] = asyncio.Queue()

    def put(self, version: int) -> None:
        """What a gate calls when nothing runs."""
        self._versions.put_nowait(version)

    async def write(self) -> None:
        """Write every answer, until cancelled."""
        while True:
            version = await self._versions.get()
            await self._writer.write(RolloutsPaused(version=version, time=time.time(), incarnation=self._incarnation))
            await self._writer.flush()

    async def close(self) -> None:
        await self._writer.close()


@contextlib.contextmanager
def follow_drain_requests(
    hub: StreamHub, gate: RolloutGate, incarnation: int, on_failure: Callable[[BaseException], None]
) -> Iterator[None]:
    """Close `gate` at every request of this incarnation while the context is open.

    Args:
        on_failure: called on the event loop with what ended the thread, or kept the gate from closing.
    """
    loop = asyncio.get_running_loop()

    def take(version: int) -> None:
        try:
            gate.close(version)
        except Exception as error:  # noqa: BLE001 - a callback's error would only be logged; it ends the run
            on_failure(error)

    def listen(entry: Entry[PauseRequest]) -> None:
        if entry.record.incarnation == incarnation:
            loop.call_soon_threadsafe(take, entry.record.version)

    def fail(error: BaseException) -> None:
        loop.call_soon_threadsafe(on_failure, error)

    feed = Feed(hub.reader(TURNS_TOPIC, TRAINER_INSTANCE, PauseRequest), listen, "turns", fail).start()
    try:
        yield
    finally:
        feed.stop()
