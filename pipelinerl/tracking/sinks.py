"""Where metrics go besides the terminal: `metrics.jsonl`, W&B, TensorBoard, Trackio, Prometheus, user classes.

A sink is a class named by its dotted path; `tracking.sinks` lists those of the user:

    class MySink:
        def __init__(self, inputs: SinkInputs) -> None: ...
        def log(self, record: MetricRecord) -> None: ...  # record.step, .time, .source, .values
        def log_rollouts(self, table: RolloutTable) -> None: ...  # optional: rollouts of an evaluation
        def finish(self, summary: Mapping[str, Any]) -> None: ...

An optional attribute `api_version` names the version of this interface that it was written for. A sink runs in a thread
of the launcher and never ends a run: its first exception becomes one warning and switches it off.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.durable import replace_file
from pipelinerl.rundir.layout import RunDir
from pipelinerl.tracking.rollout_table import RolloutTable

logger = logging.getLogger(__name__)

#: Version of `Sink` and `SinkInputs`; a change that breaks user classes needs a new number.
SINK_API_VERSION = 1
WANDB = "pipelinerl.tracking.wandb_sink.WandbSink"
PROMETHEUS = "pipelinerl.tracking.prometheus_sink.PrometheusSink"
TENSORBOARD = "pipelinerl.tracking.tensorboard_sink.TensorBoardSink"
TRACKIO = "pipelinerl.tracking.trackio_sink.TrackioSink"
#: Large, because a resumed run hands over its whole history at once.
QUEUE_RECORDS = 1_000_000
CLOSE_TIMEOUT_S = 15.0
#: Metrics whose best value is kept.
BEST = re.compile(r"evaluation/.+/(success_rate|mean_reward|avg_at_\d+|pass_at_\d+)")


@dataclass(frozen=True)
class SinkInputs:
    """What a sink is made from.

    Attributes:
        config: the resolved configuration.
        run_dir: the run's directory; `run_dir.root` is its path.
        since: when this launcher started, epoch seconds. After a resume, the records of earlier starts (with a smaller
            `time`) come first.
        told: newest step of each metric that earlier launchers gave to their sinks; None: there was no earlier one, or
            its files are gone.
    """

    config: RunConfig
    run_dir: RunDir
    since: float
    told: Mapping[str, int] | None = None


class Sink(Protocol):
    """Receives numbers. May raise anything. `log_rollouts(table: RolloutTable)` is optional."""

    def log(self, record: MetricRecord) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; `summary` is the content of `summary.json`. Free everything."""
        ...


def load_sink(path: str, inputs: SinkInputs) -> Sink:
    """Import and create a sink. Raises ConfigError for another `api_version`, or whatever the class raises."""
    module, _, name = path.rpartition(".")
    sink = getattr(importlib.import_module(module), name)
    wanted = getattr(sink, "api_version", SINK_API_VERSION)
    if wanted != SINK_API_VERSION:
        raise ConfigError("tracking.sinks", path, f"a class for api_version {SINK_API_VERSION}", f"It says {wanted}.")
    made: Sink = sink(inputs)
    return made


def make_sinks(inputs: SinkInputs) -> list[SafeSink | BackgroundSink]:
    """`metrics.jsonl` and the sinks that the configuration asks for."""
    config = inputs.config
    inputs = replace(inputs, told=told_steps(inputs.run_dir))  # before `metrics.jsonl` is written anew
    built_in = {
        "W&B": (WANDB, config.wandb.mode != "disabled"),
        "Trackio": (TRACKIO, config.tracking.trackio_project is not None),
        "Prometheus": (PROMETHEUS, config.tracking.prometheus_port is not None),
        "TensorBoard": (TENSORBOARD, config.tensorboard.enabled),
    }
    paths = {path: path for path in config.tracking.sinks}
    paths |= {name: path for name, (path, is_asked_for) in built_in.items() if is_asked_for}
    background = (BackgroundSink(name, partial(load_sink, path, inputs)) for name, path in paths.items())
    return [SafeSink("metrics.jsonl", lambda: JsonlSink(inputs)), *background]


class OnwardValues:
    """For trackers that keep what earlier launchers logged: the values that are new to them, and the best ones.

    Steps never go back: a step that a resumed run trains again keeps its first values.
    """

    def __init__(self, inputs: SinkInputs) -> None:
        self._since, self._told = inputs.since, inputs.told
        self._last_steps: dict[str, int] = {}
        #: Largest value so far of the metrics that match `BEST`, earlier starts included.
        self.best: dict[str, float] = {}

    def take(self, record: MetricRecord) -> dict[str, float]:
        """The values of `record` to log, maybe none.

        Of earlier starts these are the ones recorded after their launcher died, and its newest step again, which may
        have been lost with it.
        """
        last, is_earlier = self._last_steps, record.time < self._since
        new = {}
        for name, value in record.values.items():
            if BEST.fullmatch(name):
                self.best[name] = max(value, self.best.get(name, value))
            if is_earlier:
                last[name] = max(record.step, last.get(name, record.step))
                is_new = self._told is not None and record.step >= max(last[name], self._told.get(name, 0))
            else:
                is_new = record.step > last.get(name, -1)
            if is_new:
                new[name] = value
        return new


def told_steps(run_dir: RunDir) -> dict[str, int] | None:
    """Newest step of each metric in `metrics.jsonl`, or known to the launcher that began to rewrite it; None: there was
    no earlier launcher."""
    told: dict[str, int] = {}
    with suppress(OSError, msgspec.MsgspecError):
        told = msgspec.json.decode(run_dir.told_file.read_bytes(), type=dict[str, int])
    try:
        with run_dir.metrics_file.open("rb") as lines:
            for line in lines:
                with suppress(msgspec.MsgspecError, KeyError, TypeError):  # the last one was cut off
                    row = msgspec.json.decode(line, type=dict[str, Any])
                    told.update((name, max(row["step"], told.get(name, -1))) for name in row if "/" in name)
    except OSError:
        return told or None
    return told


class JsonlSink:
    """One flat JSON object per record: `time`, `step`, `source` and the numbers. The file is rewritten at each start,
    because the collector reads the streams from their beginning; `told` is saved in case that is cut short."""

    def __init__(self, inputs: SinkInputs) -> None:
        path = inputs.run_dir.metrics_file
        path.parent.mkdir(parents=True, exist_ok=True)
        if inputs.told is not None:
            replace_file(inputs.run_dir.told_file, msgspec.json.encode(inputs.told), durable=True)
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

    def log_rollouts(self, table: RolloutTable) -> None:
        if (take := getattr(self._sink, "log_rollouts", None)) is not None:
            self._guard(lambda: take(table))

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
            logger.warning("%s is turned off: %s: %s", self._name, type(error).__name__, error)


class BackgroundSink:
    """Runs a sink, including its start, in a daemon thread. If the sink is slower than the run, the oldest queued
    records are dropped."""

    def __init__(self, name: str, factory: Callable[[], Sink], queue_records: int = QUEUE_RECORDS) -> None:
        self._name, self._factory = name, factory
        self._condition = threading.Condition()
        self._queue: deque[MetricRecord | RolloutTable] = deque(maxlen=queue_records)
        self._summary: Mapping[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, record: MetricRecord) -> None:
        self._add(record)

    def log_rollouts(self, table: RolloutTable) -> None:
        self._add(table)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand over the rest and wait for it for a limited time."""
        with self._condition:
            self._summary = summary
            self._condition.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %.0f s and is abandoned", self._name, CLOSE_TIMEOUT_S)

    def _add(self, item: MetricRecord | RolloutTable) -> None:
        with self._condition:
            self._queue.append(item)
            self._condition.notify()

    def _run(self) -> None:
        sink = SafeSink(self._name, self._factory)
        while sink.works:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._summary is not None)
                item = self._queue.popleft() if self._queue else None
                summary = self._summary
            if isinstance(item, RolloutTable):
                sink.log_rollouts(item)
            elif item is not None:
                sink.log(item)
            elif summary is not None:
                sink.finish(summary)
