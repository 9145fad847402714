"""Numbers of a run as TensorBoard event files: one value per metric and policy version.

Imported only where it is asked for: it needs the extra `tensorboard`. Raises freely.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from pipelinerl.config.secrets import redact
from pipelinerl.records import MetricRecord
from pipelinerl.tracking.sinks import OnwardValues, SinkInputs

#: Readers recognize event files by this part of their names.
FILE_PREFIX = "events.out.tfevents."
#: Without it readers drop earlier points whenever a step is lower than the one before; processes log at their own pace.
FILE_VERSION = "brain.Event:2"


class TensorBoardSink:
    """Writes the scalars of one run; the step is the policy version, as in W&B.

    Each start adds a file to the folder, with what the files of earlier starts lack (`OnwardValues`). The configuration
    and the summary are written as text, without secrets.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, inputs: SinkInputs) -> None:
        folder = inputs.run_dir.root / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        has_history = any(folder.glob(f"{FILE_PREFIX}*"))
        self._onward = OnwardValues(inputs if has_history else replace(inputs, told={}))
        self._writer = RecordWriter(open_events(folder))
        self._put(0, inputs.since, file_version=FILE_VERSION)
        self._put_text("run/config", 0, inputs.since, inputs.config.model_dump(mode="json"))
        self._writer.flush()

    def log(self, record: MetricRecord) -> None:
        if values := self._onward.take(record):
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._put(record.step, record.time, summary=Summary(value=scalars))
            self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._put_text("run/summary", summary.get("steps") or 0, time.time(), summary)
        self._writer.close()

    def _put_text(self, tag: str, step: int, time_s: float, data: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(redact(data), sort_keys=False, allow_unicode=True, width=10_000)
        # TensorBoard renders Markdown: indented text is shown verbatim.
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._put(step, time_s, summary=text_pb(tag, indented))

    def _put(self, step: int, time_s: float, **content: Any) -> None:
        self._writer.write(Event(step=step, wall_time=time_s, **content).SerializeToString())


def open_events(folder: Path) -> BinaryIO:
    """Create an event file. Readers read the files of a folder in the order of their names."""
    return (folder / f"{FILE_PREFIX}{time.time():.6f}.{socket.gethostname()}").open("xb")
