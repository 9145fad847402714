"""Where a run's metrics go besides the terminal: `metrics.jsonl` and, if asked for, W&B and TensorBoard.

A sink never ends a run: `SafeSink` turns its first exception into one warning and switches it off; `BackgroundSink`
does the same for one that may block (network), in a thread that waits on a bounded queue. Secrets are hidden first.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pipelinerl.records import MetricRecord

HIDDEN = "***"
_SECRET_KEY = re.compile(r"(^|[_-])(token|secret|password|passwd|api_?key|credentials?|authorization)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<start>\b[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.IGNORECASE)


def redact(value: Any) -> Any:
    """Return a copy of plain data in which values of secret keys, and user names and passwords in URLs, are `***`."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key) and item else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\g<start>{HIDDEN}@", value)
    return value


def _is_secret(key: object) -> bool:
    return isinstance(key, str) and _SECRET_KEY.search(key) is not None


logger = logging.getLogger(__name__)

QUEUE_RECORDS = 10_000
CLOSE_TIMEOUT_S = 15.0


class Sink(Protocol):
    """Takes numbers. May raise anything at any time: whoever calls it wraps it in a `SafeSink` or `BackgroundSink`."""

    def log(self, record: MetricRecord) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; free everything."""
        ...


class JsonlSink:
    """One flat JSON object a record: `time`, `step`, `source` and the numbers. The file is written anew, because the
    collector reads the run's streams from their start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)

    def log(self, record: MetricRecord) -> None:
        row = {"time": record.time, "step": record.step, "source": record.source, **record.values}
        self._file.write(msgspec.json.encode(row) + b"\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._file.close()


class SafeSink:
    """Calls a sink in the caller's thread until its first exception, which becomes one warning."""

    def __init__(self, name: str, factory: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        self._guard(lambda: setattr(self, "_sink", factory()))

    def log(self, record: MetricRecord) -> None:
        if (sink := self._sink) is not None:
            self._guard(lambda: sink.log(record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        if (sink := self._sink) is not None:
            self._guard(lambda: sink.finish(summary))
            self._sink = None

    @property
    def works(self) -> bool:
        return self._sink is not None

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - tracking never ends a run, whatever a sink raises
            self._sink = None
            logger.warning("%s is off from now on: %s: %s. Training goes on", self._name, type(error).__name__, error)


class BackgroundSink:
    """Runs a sink, its start included, in a daemon thread. When the sink is slower than the run, the oldest records
    that wait for it are dropped."""

    def __init__(
        self,
        name: str,
        factory: Callable[[], Sink],
        queue_records: int = QUEUE_RECORDS,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._name, self._factory, self._close_timeout_s = name, factory, close_timeout_s
        self._condition = threading.Condition()
        self._queue: deque[MetricRecord] = deque(maxlen=queue_records)
        self._summary: Mapping[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, record: MetricRecord) -> None:
        with self._condition:
            self._queue.append(record)
            self._condition.notify()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the rest; wait for it a limited time, then leave it."""
        with self._condition:
            self._summary = summary
            self._condition.notify()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %.0f s and is left alone", self._name, self._close_timeout_s)

    def _run(self) -> None:
        sink = SafeSink(self._name, self._factory)
        while sink.works:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._summary is not None)
                record = self._queue.popleft() if self._queue else None
                summary = self._summary
            if record is not None:
                sink.log(record)
            elif summary is not None:
                sink.finish(summary)
