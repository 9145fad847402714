"""Numbers of a run as TensorBoard event files, one value for each metric and policy version.

Imported only where it is asked for: it needs the extra `tensorboard`.
Raises freely. Every start writes one new file from the run's streams, then empties the older ones: a crash loses
nothing, and what a resume repeats is there once.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from pipelinerl.config import RunConfig
from pipelinerl.config.secrets import redact
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir, read_identity
from pipelinerl.tracking.sinks import SinkInputs

#: Every reader of event files finds them by this part of their names.
FILE_PREFIX = "events.out.tfevents."
#: Second generation of the format: a session start in it voids what older files of the folder say.
FILE_VERSION = "brain.Event:2"
#: Sources that a resume never sends back to an earlier step: an evaluation that was made is not made again.
NEVER_REPEATED = ("evaluation",)

Rows = dict[int, tuple[float, dict[str, float]]]


class TensorBoardSink:
    """Writes the scalars of one run; the step is the policy version, as in W&B.

    The run's records come from the first one on. What a source recorded before this start is held back until the source
    is past that step: repeated steps replace it, and steps that were rolled back are left out. The older
    files stay until every source has continued.

    The configuration is written as text, without its secrets.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, inputs: SinkInputs) -> None:
        since, folder = inputs.since, events_folder(inputs.config, inputs.run_dir)
        self._since = since
        self._held: dict[str, Rows] = {}
        self._live: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._old_files = sorted(folder.glob(f"{FILE_PREFIX}*"))
        self._writer = RecordWriter(open_events(folder))
        self._put(0, since, file_version=FILE_VERSION)
        self._put(0, since, session_log=SessionLog(status=SessionLog.START))
        self._put_text("run/config", 0, since, inputs.config.model_dump(mode="json"))
        self._writer.flush()

    def log(self, record: MetricRecord) -> None:
        if record.source in NEVER_REPEATED:
            self._put_values(record.step, record.time, record.values)
        elif record.time < self._since:
            add_row(self._held.setdefault(record.source, {}), record)
        else:
            self._go_on(record)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        for source in self._held.keys() - self._live:
            self._release(source, None)
        self._put_text("run/summary", summary.get("steps") or 0, time.time(), summary)
        self._writer.close()
        self._clear_old_files()

    def _go_on(self, record: MetricRecord) -> None:
        rows = self._held.get(record.source)
        if rows:
            add_row(rows, record)
            self._release(record.source, record.step)
        else:
            self._put_values(record.step, record.time, record.values)
        self._live.add(record.source)
        if self._held.keys() <= self._live:
            self._clear_old_files()

    def _release(self, source: str, up_to_step: int | None) -> None:
        """Write held rows in the order of their steps."""
        rows = self._held[source]
        for step in sorted(step for step in rows if up_to_step is None or step <= up_to_step):
            self._put_values(step, *rows.pop(step))

    def _clear_old_files(self) -> None:
        """Empty them, and remove those that were emptied before: a reader never gets past a file that is gone."""
        while self._old_files:
            file = self._old_files.pop()
            if file.stat().st_size:
                os.truncate(file, 0)
            else:
                file.unlink()

    def _put_values(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._put(step, time_s, summary=Summary(value=scalars))

    def _put_text(self, tag: str, step: int, time_s: float, data: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(redact(data), sort_keys=False, allow_unicode=True, width=10_000)
        # TensorBoard reads Markdown: what is indented is shown as it is.
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._put(step, time_s, summary=text_pb(tag, indented))

    def _put(self, step: int, time_s: float, **content: Any) -> None:
        self._writer.write(Event(step=step, wall_time=time_s, **content).SerializeToString())


def add_row(rows: Rows, record: MetricRecord) -> None:
    """Take the next record of one source into `rows`. Of several values of a metric at one step the newest counts."""
    _, values = rows.get(record.step, (0.0, {}))
    rows[record.step] = (record.time, {**values, **record.values})


def events_folder(config: RunConfig, run_dir: RunDir) -> Path:
    """Where the run's event files are. A folder of the user's is one for many runs, each with a folder in it."""
    if config.tensorboard.folder is None:
        return run_dir.root / "tensorboard"
    return Path(config.tensorboard.folder).expanduser() / read_identity(run_dir.identity_file).run_id


def open_events(folder: Path) -> BinaryIO:
    """Open a new event file. Readers take the files of a folder in the order of their names."""
    return (folder / f"{FILE_PREFIX}{time.time():.6f}.{socket.gethostname()}").open("xb")
