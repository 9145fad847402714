"""Records the metrics of a process on its stream `metrics`.

Metrics never end a run: values that are not finite are left out, and a stream that cannot be written costs one warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord, record_time
from pipelinerl.streams.base import StreamWriter

logger = logging.getLogger(__name__)


class MetricRecorder:
    """Writes the metrics of the job `source` to `writer`."""

    def __init__(self, writer: StreamWriter[MetricRecord], source: str) -> None:
        self._writer = writer
        self._source = source
        self._warned: set[str] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` (names are `<role>/<thing>_<unit>`) as those of policy version `step`."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            number = float(value)
            if math.isfinite(number):
                numbers[name] = number
            else:
                self._warn_once(name, "%s is %s at step %d and is left out of the metrics", name, number, step)
        try:
            self._writer.write(MetricRecord(source=self._source, step=step, time=record_time(), values=numbers))
        except StreamError as error:
            self._warn_once("", "metrics are lost from step %d onward: %s", step, error)

    def close(self) -> None:
        """Release the stream."""
        try:
            self._writer.close()
        except StreamError as error:
            self._warn_once("", "metrics may be lost: %s", error)

    def _warn_once(self, key: str, message: str, *args: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *args)
