"""A run in one thread whose processes are cut off at any write; the streams and all that writes to them are real.

Nothing samples and nothing trains: groups are made up, and a step only counts. What is real is everything that decides
what is written, in which order, and where a restart goes on. A cut hits all processes at once, as when the launcher
ends a run; the record at the cut is absent, torn or complete.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipelinerl.actor.budget import SampleBudget, lag_policy_of
from pipelinerl.actor.groups import INTERRUPTED, Publisher, find_started_groups, find_unsettled_groups
from pipelinerl.actor.progress import Changes, TrainingProgress
from pipelinerl.actor.worker_messages import RolloutFailed
from pipelinerl.config import RunConfig
from pipelinerl.finetune.checkpoint import TrainerState
from pipelinerl.finetune.report import Reporter
from pipelinerl.finetune.weight_sync import Delivery
from pipelinerl.preprocess.main import PreprocessLoop, find_resume_point
from pipelinerl.records import (
    FateRecord,
    Group,
    MetricRecord,
    RolloutSummary,
    Sample,
    TrainerMessage,
    TrainingBatch,
    VersionSpan,
)
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.files import FileWriter
from pipelinerl.streams.hub import StreamHub

ATTEMPTS = 2


class Killed(BaseException):
    """The cut. Not an `Exception`: nothing may catch it."""


class Cutter:
    """Cuts at the n-th write of all streams together: before it, in the middle of its line, or behind it."""

    def __init__(self, rng: random.Random, writes: int) -> None:
        self.left, self.rng = writes, rng

    def append(self, original: Any, writer: FileWriter[Any], line: bytes) -> None:
        self.left -= 1
        if self.left > 0:
            original(writer, line)
            return
        kind = self.rng.choice(("before", "torn", "behind"))
        if kind == "torn":
            os.write(writer._fd, line[: self.rng.randrange(1, len(line))])
        elif kind == "behind":
            original(writer, line)
        raise Killed(kind)


class RecordingHub(StreamHub):
    """Closes what it opened: locks and files of a process go with the process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._opened: list[Any] = []

    def reader(self, *args: Any, **kwargs: Any) -> Any:
        self._opened.append(super().reader(*args, **kwargs))
        return self._opened[-1]

    def writer(self, *args: Any, **kwargs: Any) -> Any:
        self._opened.append(super().writer(*args, **kwargs))
        return self._opened[-1]

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


@dataclass
class CrashRun:
    """Run directory, settings, and the trainer's checkpoint (which is atomic in itself, see the tests of line D2)."""

    root: Path
    rng: random.Random
    config: RunConfig
    checkpoint: TrainerState = TrainerState()  # noqa: RUF009 - frozen

    def incarnation(self, number: int, steps: int) -> None:
        """One start; returns when step `steps` is done. `Killed` passes through."""
        with contextlib.closing(self.hub()) as hub:
            self._live(self._context(number, hub), steps)

    def hub(self) -> RecordingHub:
        return RecordingHub(self.config.streams, RunDir(self.root), "run")

    def _live(self, context: Any, steps: int) -> None:
        trainer = _Trainer(context, self.checkpoint)
        trainer.reporter.started(trainer.state)
        trainer.deliver()
        preprocessor = _Preprocessor(context)
        actor = _Actor(context, self.rng)
        for _ in range(100_000):
            process = self.rng.choice((trainer, preprocessor, actor, actor))
            process.act()
            if trainer.state.step > self.checkpoint.step and self.rng.random() < 0.3:
                self.checkpoint = trainer.state
            if trainer.state.step >= steps:
                self.checkpoint = trainer.state
                return
        raise AssertionError("the processes wait for each other")

    def _context(self, incarnation: int, hub: StreamHub) -> Any:
        return SimpleNamespace(
            config=self.config,
            world=SimpleNamespace(num_finetune_ranks=1, jobs_of=lambda kind: []),
            job=SimpleNamespace(name="preprocessor_0"),
            run_dir=RunDir(self.root),
            incarnation=incarnation,
            heartbeat=Heartbeat(self.root / "heartbeat.json", 60),
            streams=hub,
        )


class _Trainer:
    def __init__(self, context: Any, state: TrainerState) -> None:
        hub = context.streams
        self.state = state
        self.feed = hub.reader("training_data", "preprocessor_0", TrainingBatch, state.data_offset)
        self.reporter = Reporter(
            hub.writer("trainer", "finetune_0", TrainerMessage),
            hub.writer("fates", "finetune_0", FateRecord),
            SimpleNamespace(log=lambda *_: None),
            context.incarnation,
        )

    def deliver(self) -> None:
        self.reporter.weights_delivered(Delivery(self.state.step, {}, 1, None, 0.0))

    def act(self) -> None:
        entries = self.feed.read(0, max_records=1)
        if entries:
            batch = entries[0].record
            assert batch.step == self.state.step + 1
            self.state = self.state.after(batch, self.feed.offset)
            self.deliver()
            self.reporter.step_done(batch, self.state, 0.0)


class _Preprocessor:
    def __init__(self, context: Any) -> None:
        resume = find_resume_point(context.streams, context.job.name, context.incarnation)
        self.loop = PreprocessLoop(context, resume, None)
        self.messages = context.streams.reader("trainer", "finetune_0", TrainerMessage)

    def act(self) -> None:
        for entry in self.messages.read(0):
            self.loop._view.take(entry.record)
        if entries := self.loop._groups.read(0, max_records=2):
            self.loop._queue(entries)
        self.loop._dispatch()


class _Actor:
    def __init__(self, context: Any, rng: random.Random) -> None:
        config, hub, name = context.config, context.streams, "actor_0"
        self.rng = rng
        self.incarnation = context.incarnation
        self.budget = SampleBudget(lag_policy_of(config), ATTEMPTS)
        self.budget.observe_rollout(1)
        self.view = TrainingProgress(self.budget, self.incarnation, Changes())
        self.messages = hub.reader("trainer", "finetune_0", TrainerMessage)
        self.fates = hub.reader("fates", "preprocessor_0", FateRecord)
        self.publisher = Publisher(
            source=name,
            incarnation=self.incarnation,
            groups=hub.loop_writer("actor", name, Group),
            fates=hub.loop_writer("fates", name, FateRecord),
            metrics=hub.loop_writer("metrics", name, MetricRecord),
        )
        self.running: dict[str, int] = {}
        self._hear()
        started = find_started_groups(hub, name)
        for group_id, rollouts in started.open_groups.items():
            version = self.view.current_version
            _now(self.publisher.write_fate("unused", group_id, INTERRUPTED, rollouts, version))
        self.numbers = itertools.chain(started.numbers_due, itertools.count(started.next_number))
        for group_id, ids in find_unsettled_groups(hub, name, self.view.steps_done).items():
            self.budget.publish(group_id, ids)

    def _hear(self) -> None:
        for entry in self.messages.read(0):
            self.view.apply_message(entry.record)
        for entry in self.fates.read(0):
            self.view.apply_fate(entry.record)

    def act(self) -> None:
        self._hear()
        if len(self.running) < 4 and self.budget.allows_group() and self.rng.random() < 0.6:
            group_id = f"{self.incarnation}-{next(self.numbers)}"
            self.budget.start_group(group_id)
            _now(self.publisher.write_fate("pending", group_id, "started", ATTEMPTS, self.view.current_version))
            self.running[group_id] = self.view.current_version
        elif self.running:
            self._finish(self.rng.choice(list(self.running)))

    def _finish(self, group_id: str) -> None:
        first, last = self.running.pop(group_id), self.view.current_version
        failed = [RolloutFailed(0, "grader", "")] if self.rng.random() < 0.1 else []
        equal = self.rng.random() < 0.2
        samples = [
            made_up_sample(group_id, k, first, last, 1.0 if equal else float(k)) for k in range(ATTEMPTS - len(failed))
        ]
        rollouts = [
            RolloutSummary(
                rollout_id=s.rollout_id, reward=s.reward, success=True, num_samples=1, output_tokens=4, latency_s=1
            )
            for s in samples
        ]
        record = Group(
            id=group_id,
            problem_id="p",
            dataset_name="d",
            samples=samples,
            rollouts=rollouts,
            failed_rollouts=len(failed),
            incarnation=self.incarnation,
        )
        for index in range(ATTEMPTS):
            self.budget.end_rollout(group_id, int(index < len(samples)))
        _now(self.publisher.write_failures(record.id, failed, last))
        self.budget.publish(group_id, [sample.id for sample in samples])
        if samples:
            _now(self.publisher.publish_group(record, last))


def _now(call: Coroutine[Any, Any, Any]) -> None:
    """Writers of files wait for nothing, so that what awaits them runs through."""
    with contextlib.suppress(StopIteration):
        call.send(None)
        raise AssertionError("it waits for something")


def made_up_sample(group_id: str, index: int, first: int, last: int, reward: float) -> Sample:
    spans = [VersionSpan(first, 0, 4)] if first == last else [VersionSpan(first, 0, 2), VersionSpan(last, 2, 4)]
    rollout_id = f"{group_id}/r{index}"
    return Sample(
        id=f"{rollout_id}/s0",
        group_id=group_id,
        rollout_id=rollout_id,
        input_ids=[1, 2, 3, 4, 5],
        labels=[-100, 2, 3, 4, 5],
        logprobs=[-0.5] * 4,
        reward=reward,
        finished=True,
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=4,
        version_spans=spans,
        incarnation=int(group_id.partition("-")[0]),
    )
