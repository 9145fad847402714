"""Collects a run's metrics: follows its streams, shows them, and writes `metrics.jsonl`, summary and plot.

One background feed per stream, each in a blocking read. Threads share one lock around the `RunState` and one around the
sinks.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelinerl.commands import typed
from pipelinerl.config import RunConfig
from pipelinerl.records import (
    EvaluationResult,
    FateRecord,
    MetricRecord,
    TrainerMessage,
    WeightUpdateSuccess,
    record_time,
)
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import EVALUATION_TOPIC, FATES_TOPIC, METRICS_TOPIC, TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import Feed
from pipelinerl.tracking.display import Display, make_display, quiet_line, read_beats
from pipelinerl.tracking.health import EqualRewards, Finding, Health, Waits, add_finding
from pipelinerl.tracking.rollout_table import RolloutTables
from pipelinerl.tracking.sinks import SinkInputs, make_sinks
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.summary import LearningCurve, Status, build_summary, plot_learning_curve, write_json
from pipelinerl.world import WorldMap

logger = logging.getLogger(__name__)

RECORDING_KINDS = ("actor", "preprocessor", "finetune")


class Collector:
    """Follows one run from the first record of its streams.

    Args:
        hub: the run's streams.
        world: the processes that write them.
        run_dir: where the results go.
        config: the resolved configuration.
        display: None: the table or plain lines on standard output.
        incarnation: of this start. Earlier ones count, but are not reported again.
    """

    def __init__(
        self,
        hub: StreamHub,
        world: WorldMap,
        run_dir: RunDir,
        config: RunConfig,
        display: Display | None = None,
        incarnation: int = 0,
    ) -> None:
        self._incarnation = incarnation
        self._since = record_time() if incarnation else 0.0
        self._health = _health_of(config, world, run_dir)
        self._run_dir = run_dir
        self._max_steps = config.finetune.known_steps
        self._title = run_dir.root.name
        self._state = RunState(incarnation)
        self._lock = threading.RLock()
        self._sink_lock = threading.Lock()
        started = time.monotonic()
        self._sinks = make_sinks(SinkInputs(config, run_dir, record_time()))
        self._display = display or make_display(
            sys.stdout,
            self._title,
            config,
            lambda state: quiet_line(state, config, read_beats(run_dir, world.jobs), time.monotonic() - started),
        )
        self._tables = _tables_of(hub, world, run_dir, config)
        self._replaced_workers: dict[str, int] = {}
        self._display_works = self._draws = True
        self._feeds = self._make_feeds(hub, world)
        self._stopped = False

    def start(self) -> None:
        """Start following the streams and showing the run."""
        self._show(lambda: self._display.start(self.snapshot))
        for feed in self._feeds:
            feed.start()

    def stop(self) -> None:
        """Read what is in the streams now and end. May be called twice. Errors are logged."""
        if self._stopped:
            return
        self._stopped = True
        for feed in self._feeds:
            try:
                feed.stop()
            except Exception as error:  # noqa: BLE001 - the others' last records still count
                logger.error("a stream could not be read to its end: %s", error)
        self._close_tables()
        self._show(self._display.stop)

    def raise_if_failed(self) -> None:
        """Raise the error that ended a feed, if any (a corrupt record, for instance)."""
        for feed in self._feeds:
            feed.raise_if_failed()

    def snapshot(self, read: Callable[[RunState], Any]) -> Any:
        """Return `read(state)` while nothing changes the state."""
        with self._lock:
            return read(self._state)

    def write_summary(self, status: Status, reason: str | None, more: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Stop, write `summary.json` (with the entries of `more`) and `learning_curve.png` (if there is data), finish
        the sinks, and return the summary."""
        self.stop()
        with self._lock:
            summary = {**build_summary(self._state, status, reason), **more}
            try:
                write_json(self._run_dir.summary_file, summary)
            except OSError as error:
                logger.error("%s cannot be written: %s", self._run_dir.summary_file, error)
        self._draw()
        for sink in self._sinks:
            sink.finish(summary)
        return summary

    def _draw(self) -> None:
        # Not under the state's lock: importing matplotlib takes a second, which a run without data skips.
        curve = self.snapshot(LearningCurve.of)
        if not self._draws or not curve:
            return
        try:
            plot_learning_curve(curve, self._run_dir.learning_curve_file, self._title)
        except Exception as error:  # noqa: BLE001 - a picture never changes how a run ends
            self._draws = False
            logger.warning("%s cannot be drawn: %s", self._run_dir.learning_curve_file, error)
        # A figure has reference cycles that would keep some megabytes per evaluation.
        gc.collect()

    def _make_feeds(self, hub: StreamHub, world: WorldMap) -> list[Feed[Any]]:
        names = [job.name for kind in RECORDING_KINDS for job in world.jobs_of(kind)]
        actors = [job.name for job in world.jobs_of("actor")]
        followed: list[tuple[str, str, Any, Callable[[Any], None]]] = [
            *((METRICS_TOPIC, name, MetricRecord, self._on_metrics) for name in names),
            *((FATES_TOPIC, name, FateRecord, self._on_fate) for name in names),
            *((EVALUATION_TOPIC, name, EvaluationResult, self._on_evaluation) for name in actors),
            *((TRAINER_TOPIC, job.name, TrainerMessage, self._on_trainer) for job in world.jobs_of("finetune")[:1]),
        ]
        return [
            Feed(hub.reader(topic, name, kind), lambda entry, take=take: take(entry.record), f"{topic}-{name}")  # type: ignore[misc]
            for topic, name, kind, take in followed
        ]

    def _on_metrics(self, record: MetricRecord) -> None:
        findings: list[Finding] = []
        with self._lock:
            self._state.fold_metrics(record)
            if record.time >= self._since:
                if "finetune/loss" in record.values:
                    self._show(lambda: self._display.step_recorded(self._state, record))
                findings = self._health.metrics(self._state, record)
        self._notice_blocked_workers(record)
        self._log(record)
        self._tell(findings)

    def _notice_blocked_workers(self, record: MetricRecord) -> None:
        replaced = int(record.values.get("actor/replaced_workers", 0))
        if record.time >= self._since and replaced > self._replaced_workers.get(record.source, 0):
            self._replaced_workers[record.source] = replaced
            log = self._run_dir.job(record.source) / "stderr.log"
            line = f"warning: your code blocked a rollout worker, which was replaced ({replaced} so far); see {log}"
            self._show(lambda: self._display.notice(line))

    def _on_fate(self, record: FateRecord) -> None:
        findings: list[Finding] = []
        with self._lock:
            self._state.fold_fate(record)
            if record.incarnation == self._incarnation:
                findings = self._health.fate(record)
        self._tell(findings)

    def _on_evaluation(self, result: EvaluationResult) -> None:
        dataset = result.dataset_name
        values = {
            #: mean over problems of the share of successful rollouts, without failed ones
            f"evaluation/{dataset}/success_rate": result.success_rate,
            f"evaluation/{dataset}/mean_reward": result.mean_reward,  #: mean reward, likewise
            f"evaluation/{dataset}/num_rollouts": float(result.num_rollouts),  #: rollouts of the evaluation
            f"evaluation/{dataset}/num_failed": float(result.num_failed),  #: rollouts that failed
            f"evaluation/{dataset}/seconds": result.seconds,  #: duration of the evaluation
            f"evaluation/{dataset}/output_tokens": result.output_tokens,  #: mean number of sampled tokens per rollout
            #: share of rollouts with a sample that was cut off by the token limit or the context length
            f"evaluation/{dataset}/cut_fraction": result.cut_fraction,
        }
        for estimate, found in result.estimates.items():
            #: `avg_at_<k>`: mean success of k samples per problem; `pass_at_<j>`: chance that one of j is correct
            values[f"evaluation/{dataset}/{estimate}"] = found.value
        for metric, value in result.metrics.items():
            values[f"evaluation/{dataset}/{metric}"] = value  #: mean of one of the domain's own metrics
        with self._lock:
            self._state.fold_evaluation(result)
            if result.time >= self._since:
                self._show(lambda: self._display.evaluated(self._state, result))
        if result.time >= self._since:
            self._draw()
        self._log(_row("evaluation", result.due_version, result.time, values))
        if result.time >= self._since:
            self._log_rollouts(result)

    def _log_rollouts(self, result: EvaluationResult) -> None:
        try:
            table = self._tables and self._tables.table_of(result)
        except Exception as error:  # noqa: BLE001 - a table of a tracker never ends a run
            self._close_tables()
            logger.warning("tables of rollouts are off from now on: %s: %s", type(error).__name__, error)
            return
        if table:
            with self._sink_lock:
                for sink in self._sinks:
                    sink.log_rollouts(table)

    def _close_tables(self) -> None:
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.close()

    def _on_trainer(self, message: TrainerMessage) -> None:
        with self._lock:
            self._state.fold_trainer(message)
        if isinstance(message, WeightUpdateSuccess):
            values: dict[str, float | None] = {
                #: longest time a server was paused, with the steps it finishes first; after a retry: the whole call
                "weight_update/paused_s": message.seconds.get("paused"),
                "weight_update/num_servers": float(message.num_servers),  #: servers that received the update
                #: bytes sent to each server: the model, or the adapter with `finetune.lora.sync=adapter`
                "weight_update/sent_bytes": message.sent_bytes,
                #: mean abs(log pi - log mu) of the probe (first and last update, `supervise.probe_every_n_updates`)
                "weight_update/logprob_abs_diff_mean": message.probe_abs_diff,
            }
            for phase, seconds in message.seconds.items():
                #: seconds of pause, transfer, load and resume on the slowest server; `total`: of the trainer's call
                values[f"weight_update/{phase}_s"] = seconds
            self._log(_row("weight_update", message.version, message.time, values))

    def _log(self, record: MetricRecord) -> None:
        # Not under the state's lock: a sink may write to the terminal, whose redraw waits for the state.
        with self._sink_lock:
            for sink in self._sinks:
                sink.log(record)

    def _tell(self, findings: Sequence[Finding]) -> None:
        # Not under the state's lock, as in `_log`.
        for finding in findings:
            logger.warning("%s", finding.line)
            self._show(lambda: self._display.notice(finding.line))  # noqa: B023 - called at once
            self._log(_row("health", finding.step, record_time(), {f"health/{finding.name}": 1.0}))
            try:
                add_finding(self._run_dir.findings_file, finding)
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._run_dir.findings_file, error)

    def _show(self, action: Callable[[], None]) -> None:
        if not self._display_works:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a closed terminal never ends a run
            self._display_works = False
            logger.warning("the display is turned off: %s: %s", type(error).__name__, error)


def _health_of(config: RunConfig, world: WorldMap, run_dir: RunDir) -> Health:
    # Sides that alternate wait by design, and on a CPU they share the cores.
    waits_by_design = config.schedule == "conventional" or config.max_lag == 0 or world.device == "cpu"
    advice = f"`{typed('plan')} --from {run_dir.root}` suggests what to change."
    waits = None if waits_by_design else Waits(advice)
    log = str(run_dir.job("actor_0") / "stdout.log")
    return Health(EqualRewards(config.finetune.samples_per_step, log), waits, str(run_dir.root))


def _tables_of(hub: StreamHub, world: WorldMap, run_dir: RunDir, config: RunConfig) -> RolloutTables | None:
    """None: no sink takes tables."""
    tracking = config.tracking
    takers = config.wandb.mode != "disabled" or tracking.trackio_project or tracking.sinks
    actor = next(iter(world.jobs_of("actor")), None)
    if not takers or not tracking.rollouts_per_evaluation or actor is None:
        return None
    return RolloutTables(hub, run_dir, config, actor.name)


def _row(source: str, step: int, time_s: float, values: Mapping[str, float | None]) -> MetricRecord:
    known = {name: float(value) for name, value in values.items() if value is not None}
    return MetricRecord(source=source, step=step, time=time_s, values=known)
