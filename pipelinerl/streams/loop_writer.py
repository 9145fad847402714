"""A stream's writer for an event loop: the loop goes on while a record is written, or waits for room.

Made by `StreamHub.loop_writer`; the actor writes through it. Where a write may wait (for a full stream's reader, for a
server that comes back, for the disk) it is done in a thread of this stream alone, in the order of the calls; a write
that waits for nothing is done at once. Nothing is buffered but what callers wait for: who awaits `write` bounds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from pipelinerl.streams.base import StreamWriter

T = TypeVar("T")
Result = TypeVar("Result")


class LoopWriter(Generic[T]):
    """Owns `writer`: `close` closes it.

    Args:
        writer: of the stream.
        may_wait: whether `write` or `flush` can take long; False: they are called on the loop.
    """

    def __init__(self, writer: StreamWriter[T], may_wait: bool) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream-writer") if may_wait else None

    async def write(self, record: T) -> int:
        """Append one record and return its offset; it is written then.

        A caller that is cancelled meanwhile does not take the record back: it is written before what follows.

        Raises:
            NoRoom: the stream is full and `end_waits` was called; the record is not in the stream.
            StreamError: as the writer's `write`.
        """
        return await self._call(lambda: self._writer.write(record))

    async def flush(self) -> None:
        """Make everything written so far as durable as `streams.fsync` asks for."""
        await self._call(self._writer.flush)

    def end_waits(self) -> None:
        """From now on a write for which there is no room fails with `NoRoom`, those that wait now included."""
        self._writer.end_waits()

    async def close(self) -> None:
        """Write and flush what was asked for, wait for no reader any more, and release the stream.

        Raises:
            StreamError: records could not be made durable.
        """
        self.end_waits()
        try:
            await self._call(self._finish)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    def _finish(self) -> None:
        try:
            self._writer.flush()
        finally:
            self._writer.close()

    async def _call(self, call: Callable[[], Result]) -> Result:
        if self._thread is None:
            return call()
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, call))
