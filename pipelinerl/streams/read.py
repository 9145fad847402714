"""Two ways to consume a stream: `read_all` what is in it now, or follow it with a `Feed` in a background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from pipelinerl.streams.base import Entry, StreamReader
from pipelinerl.streams.hub import StreamHub

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FEED_TIMEOUT_S = 5.0
_MAX_RECORDS = 256


def read_all(streams: StreamHub, topic: str, instance: str, record_type: Any, start: int = 0) -> Iterator[Any]:
    """Yield the records that are in a stream now, from offset `start` on. See `read_entries`."""
    for entry in read_entries(streams, topic, instance, record_type, start):
        yield entry.record


def read_one(streams: StreamHub, topic: str, instance: str, record_type: Any, offset: int) -> Any:
    """The record at `offset`; None: there is none. See `read_entries`."""
    return next((each.record for each in read_entries(streams, topic, instance, record_type, offset, offset + 1)), None)


def read_entries(
    streams: StreamHub, topic: str, instance: str, record_type: Any, start: int = 0, end: int | None = None
) -> Iterator[Entry[Any]]:
    """Yield what is in a stream now, from offset `start` to before `end`, with offsets. Waits for nothing, creates
    nothing.

    `record_type` may be a head: a struct with some of the fields, and only these are decoded.

    Raises:
        StreamError: a record cannot be read; file or key, offset and reason.
    """
    reader = streams.reader(topic, instance, record_type, start)
    try:
        while end is None or reader.offset < end:
            entries = reader.read(0, _MAX_RECORDS if end is None else min(_MAX_RECORDS, end - reader.offset))
            if not entries:
                return
            yield from entries
    finally:
        reader.close()


class Feed(Generic[T]):
    """Follows a stream in a background thread. Owns the reader: `stop` closes it.

    An exception of the reader or the listener is raised again in every thread that waits on the feed.

    Args:
        reader: where the records come from.
        listener: called in the feed's thread with each entry, one at a time and in order.
        name: of the thread, for logs and tracebacks.
        on_failure: called once, in the feed's thread, with what ended it; may wake an event loop, for instance.
    """

    def __init__(
        self,
        reader: StreamReader[T],
        listener: Callable[[Entry[T]], None],
        name: str,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._reader = reader
        self._listener = listener
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"feed-{name}", daemon=True)

    def start(self) -> Feed[T]:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Hand over what is in the stream now, end the thread, and raise the exception that ended it before, if any."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._reader.wake()
            self._thread.join()
        self._reader.close()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the thread, if one did."""
        if self._failure is not None:
            raise self._failure

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block until `predicate` holds; it is tested now and after every record.

        Returns:
            Its last value: False means time-out, or that the feed was stopped.

        Raises:
            BaseException: what ended the thread.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._ended() or predicate(), timeout_s)
            if not (held := predicate()):
                self.raise_if_failed()
            return held

    def _ended(self) -> bool:
        return self._failure is not None or self._stopping

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._deliver(self._reader.read(_FEED_TIMEOUT_S))
            while entries := self._reader.read(0):
                self._deliver(entries)
        except BaseException as error:  # noqa: BLE001 - kept, and raised again in whoever waits
            logger.error("%s ended: %s: %s", self._thread.name, type(error).__name__, error)
            with self._condition:
                self._failure = error
            if self._on_failure is not None:
                self._on_failure(error)
        finally:
            with self._condition:
                self._condition.notify_all()

    def _deliver(self, entries: Sequence[Entry[T]]) -> None:
        for entry in entries:
            with self._condition:
                self._listener(entry)
                self._condition.notify_all()
