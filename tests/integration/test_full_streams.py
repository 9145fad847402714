"""Full streams in Redis: the actor's event loop keeps running, nothing grows without bound, nobody waits in a circle.

The streams are real, with tiny budgets, and so is what writes and reads them; rollouts and steps are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.crash_run import made_up_sample
from fakes.made_up_rollouts import InstantRollouts, ended
from msgspec.structs import replace

from pipelinerl.actor.main import Actor
from pipelinerl.actor.worker_messages import RolloutEnded, StartRollout
from pipelinerl.analysis.ledger import build_ledger, read_records
from pipelinerl.config import RunConfig
from pipelinerl.config.resources import RedisStreams
from pipelinerl.domains.user_task import Problem, ProblemSets
from pipelinerl.errors import NoRoom
from pipelinerl.finetune.checkpoint import TrainerState
from pipelinerl.finetune.pauses import RolloutPause
from pipelinerl.finetune.report import Reporter
from pipelinerl.finetune.weight_sync import Delivery
from pipelinerl.preprocess.main import PreprocessLoop, find_resume_point
from pipelinerl.records import (
    FateRecord,
    Group,
    MetricRecord,
    PauseRequest,
    RolloutsPaused,
    TrainerMessage,
    TrainingBatch,
)
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import PREPROCESSOR_CONSUMER, TRAINER_CONSUMER
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.redis_server import RedisServer

LIMIT_S = 60.0
ATTEMPTS, SLOTS, BATCH = 2, 8, 8
BYTE_BUDGET = 64 * 2**10  # a few dozens of the groups below


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), RedisStreams(backend="redis")) as running:
        yield running


_RUNS = itertools.count()


@pytest.fixture
def hub(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamHub:
    monkeypatch.setenv("PIPELINERL_REDIS_URL", server.url)
    return StreamHub(config(tmp_path).streams, RunDir(tmp_path), f"run-{next(_RUNS)}")


def config(root: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output_dir": str(root),
            "schedule": "concurrent",
            "attempts": ATTEMPTS,
            "actor": {"llm_max_rollouts": SLOTS},
            "max_lag": None,
            "pop_old_data": False,
            "preprocess": {"ring_buffer_size": 1},
            "finetune": {"train_batch_size": 1, "gradient_accumulation_passes": BATCH, "seq_length": 64},
            "streams": {"backend": "redis", "byte_budget": BYTE_BUDGET, "backpressure_timeout_s": 10 * LIMIT_S},
        }
    )


class NoticedEvent(threading.Event):
    """`waits` is set while somebody waits; `looks` counts the waits, before each of which there was no room."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()
        self.looks = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        self.waits.set()
        try:
            return super().wait(timeout)
        finally:
            self.waits.clear()


class RunningActor:
    """The real actor without worker processes: every rollout ends at once, with one sample."""

    def __init__(self, hub: StreamHub, root: Path) -> None:
        context: Any = SimpleNamespace(
            config=config(root),
            world=SimpleNamespace(jobs_of=lambda kind: [SimpleNamespace(name="actor_llm_0", url="http://none")]),
            job=SimpleNamespace(name="actor_0"),
            incarnation=0,
            token="",
            heartbeat=Heartbeat(root / "actor.json", 60),
            streams=hub,
        )
        pool: Any = InstantRollouts(self.answer)
        problems = ProblemSets([Problem(id="p", dataset_name="d", data={})], [])
        self.actor = Actor(context, problems, pool)
        self.groups, self.publisher, self.progress = self.actor.groups, self.actor.publisher, self.actor.progress
        # Set while the writer of groups waits for the preprocessor.
        self.writer: Any = self.publisher.groups._writer  # type: ignore[attr-defined]
        self.writer._waits_no_more = self.room = NoticedEvent()
        self.waits = self.room.waits

    def answer(self, start: StartRollout) -> RolloutEnded:
        version, index = self.progress.current_version, int(start.rollout_id.rpartition("r")[2])
        sample = made_up_sample(start.group_id, index, version, version, float(index))
        return replace(ended(start.rollout_id), samples=[sample])

    def rests(self) -> bool:
        """Whether nothing runs, and as much is held as may be."""
        held = self.groups._unwritten_groups
        return self.groups.running_groups == 0 and held * ATTEMPTS >= SLOTS

    async def rests_with_a_full_stream(self) -> None:
        """The writer has looked twice and written nothing in between, so it knows of everything that was read."""
        offset = -1
        while offset != self.writer.next_offset:
            offset, looks = self.writer.next_offset, self.room.looks
            await until(lambda looks=looks: self.room.looks >= looks + 2)  # type: ignore[misc]
        await until(self.rests)

    async def close(self) -> None:
        await self.publisher.close()
        await self.actor.evaluator.results.close()
        assert self.actor.pause_answers is not None
        await self.actor.pause_answers.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - set in another thread
            await asyncio.sleep(0.001)


def started_and_ended(hub: StreamHub) -> tuple[Counter[str], Counter[str]]:
    """Rollouts by group: those that were started, and those that were published or have a fate."""
    started: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for fate in _all(hub, "fates", FateRecord):
        (started if fate.fate == "pending" else ended)[fate.group_id] += fate.num_rollouts
    for group in _all(hub, "actor", Group):
        ended[group.id] += len(group.rollouts)
    return started, ended


def _all(hub: StreamHub, topic: str, record_type: Any) -> list[Any]:
    with contextlib.closing(hub.reader(topic, "actor_0", record_type)) as reader:
        records: list[Any] = []
        while entries := reader.read(0):
            records += [entry.record for entry in entries]
        return records


async def test_d6_the_event_loop_continues_while_the_stream_is_full(hub: StreamHub, tmp_path: Path) -> None:
    actor = RunningActor(hub, tmp_path)
    rollouts = asyncio.create_task(actor.groups.run())
    # What runs comes to its end, and nothing more is started: a bounded number of groups is held.
    await actor.rests_with_a_full_stream()
    held = actor.groups._unwritten_groups
    assert held <= 2 * SLOTS // ATTEMPTS
    # Everything else continues: other streams are written, the gate answers.
    async with asyncio.timeout(LIMIT_S):
        await actor.publisher.publish_metrics({"a": 1.0}, 0)
    assert actor.rests() and actor.groups._unwritten_groups == held
    # A reader that comes gets everything in order, and more groups are started.
    reader = hub.reader("actor", "actor_0", Group, consumer=PREPROCESSOR_CONSUMER)
    groups: list[str] = []
    while len(groups) < 200:
        groups += [entry.record.id for entry in await asyncio.to_thread(reader.read, LIMIT_S)]
    assert sorted(groups, key=lambda group_id: int(group_id[2:]))[:100] == [f"0-{number}" for number in range(100)]
    # Training ends while the stream is full again: what has no room is given up, with a fate, and nobody waits.
    await actor.rests_with_a_full_stream()
    held = actor.groups._unwritten_groups
    actor.progress.done = True
    actor.progress.changes.notify()
    await asyncio.wait_for(rollouts, LIMIT_S)
    await actor.close()
    started, ended = started_and_ended(hub)
    assert started == ended and set(started.values()) == {ATTEMPTS}
    given_up = [fate for fate in _all(hub, "fates", FateRecord) if fate.fate == "unused"]
    assert len(given_up) >= held and {fate.reason for fate in given_up} == {"training_done"}


async def test_an_ended_run_leaves_a_full_stream_at_once(hub: StreamHub, tmp_path: Path) -> None:
    actor = RunningActor(hub, tmp_path)
    rollouts = asyncio.create_task(actor.groups.run())
    await until(actor.waits.is_set)
    rollouts.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(rollouts, LIMIT_S)
    await asyncio.wait_for(actor.close(), LIMIT_S)
    started, ended = started_and_ended(hub)
    assert set(ended) <= set(started) and max(ended.values()) == ATTEMPTS, "no group is published and given up"


async def test_a_record_whose_caller_was_cancelled_is_written_before_the_next(hub: StreamHub) -> None:
    writer = hub.loop_writer("metrics", "actor_0", MetricRecord)
    entered, go_on = threading.Event(), threading.Event()
    write = writer._writer.write

    def held(record: MetricRecord) -> int:
        entered.set()
        assert go_on.wait(LIMIT_S)
        return write(record)

    writer._writer.write = held  # type: ignore[method-assign]
    first = asyncio.create_task(writer.write(MetricRecord(source="s", step=0, time=0.0, values={})))
    await until(entered.is_set)
    first.cancel()
    second = asyncio.create_task(writer.write(MetricRecord(source="s", step=1, time=0.0, values={})))
    go_on.set()
    assert await asyncio.wait_for(second, LIMIT_S) == 1
    assert first.cancelled()
    await writer.close()
    assert [record.step for record in _all(hub, "metrics", MetricRecord)] == [0, 1]


async def test_a_writer_that_waits_no_more_says_what_was_not_written(hub: StreamHub) -> None:
    writer = hub.loop_writer("actor", "actor_0", MetricRecord)
    writer.end_waits()
    large = [MetricRecord(source="x" * 20_000, step=step, time=0.0, values={}) for step in range(4)]
    # A log of one record takes one more of any size.
    assert [await writer.write(record) for record in large[:2]] == [0, 1]
    for record in large[2:]:
        with pytest.raises(NoRoom, match="offset 2 cannot be written: the stream is full"):
            await writer.write(record)
    await writer.close()
    assert [record.step for record in _all(hub, "actor", MetricRecord)] == [0, 1]


class Trainer(threading.Thread):
    """Trains by counting. Pauses rollouts after every step, while the actor's stream is full as well."""

    def __init__(self, hub: StreamHub, steps: int, actor: RunningActor, queue_is_full: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.heartbeat = actor.actor.context.heartbeat
        self.hub, self.steps, self.actor, self.queue_is_full = hub, steps, actor, queue_is_full
        self.paused: list[int] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failure = error

    def _train(self) -> None:
        hub, state, heartbeat = self.hub, TrainerState(), self.heartbeat
        batches = hub.reader("training_data", "preprocessor_0", TrainingBatch, consumer=TRAINER_CONSUMER)
        pause = RolloutPause(
            hub.writer("turns", "finetune_0", PauseRequest),
            hub.reader("turns", "actor_0", RolloutsPaused),
            0,
            heartbeat,
            LIMIT_S,
        )
        reporter = Reporter(
            hub.writer("trainer", "finetune_0", TrainerMessage),
            hub.writer("fates", "finetune_0", FateRecord),
            SimpleNamespace(log=lambda *_: None),
        )
        reporter.started(state)
        reporter.weights_delivered(Delivery(0, {}, 1, None, 0.0))
        while state.step < self.steps:
            (entry,) = batches.read(LIMIT_S, max_records=1)
            state = state.after(entry.record, batches.offset)
            # The preprocessor waits for this step, the actor for the preprocessor, and the trainer for the actor.
            while not (self.queue_is_full() and self.actor.waits.wait(0.001)):
                pass
            assert pause.wait(state.step)
            self.paused.append(state.step)
            reporter.weights_delivered(Delivery(state.step, {}, 1, None, 0.0))
            reporter.step_done(entry.record, state, 0.0)
        reporter.training_done(state)


def preprocess_loop(hub: StreamHub, root: Path) -> PreprocessLoop:
    context = SimpleNamespace(
        config=config(root),
        world=SimpleNamespace(num_finetune_ranks=1, jobs_of=lambda kind: []),
        job=SimpleNamespace(name="preprocessor_0"),
        run_dir=RunDir(root),
        incarnation=0,
        heartbeat=Heartbeat(root / "heartbeat.json", 60),
        streams=hub,
    )
    return PreprocessLoop(context, find_resume_point(hub, "preprocessor_0"), None)  # type: ignore[arg-type]


def test_l8_a_preprocessor_that_has_no_room_ends_with_the_training(hub: StreamHub, tmp_path: Path) -> None:
    """The last batches are never read: they are for steps after the last one."""
    groups = hub.writer("actor", "actor_0", Group)
    for number in range(4 * BATCH // ATTEMPTS):
        samples = [made_up_sample(f"0-{number}", k, 0, 0, float(k)) for k in range(ATTEMPTS)]
        groups.write(Group(id=f"0-{number}", problem_id="p", dataset_name="d", samples=samples, rollouts=[]))
    preprocessor = preprocess_loop(hub, tmp_path)
    writer: Any = preprocessor._outputs._batches
    writer._limit_bytes = 1
    writer._waits_no_more = NoticedEvent()
    waits = writer._waits_no_more.waits
    batching = threading.Thread(target=preprocessor.run, daemon=True)
    batching.start()
    messages = hub.writer("trainer", "finetune_0", TrainerMessage)
    reporter = Reporter(messages, hub.writer("fates", "finetune_0", FateRecord), SimpleNamespace(log=lambda *_: None))
    # The trainer is done with two steps, and nothing says that it took their batches.
    reporter.weights_delivered(Delivery(2, {}, 1, None, 0.0))
    assert waits.wait(LIMIT_S)
    reporter.training_done(TrainerState(step=2))
    batching.join(LIMIT_S)
    assert not batching.is_alive()
    preprocessor.close()


@pytest.mark.timeout(4 * LIMIT_S)
async def test_l7_full_streams_and_a_pause_never_wait_in_a_circle(hub: StreamHub, tmp_path: Path) -> None:
    steps = 6
    preprocessor = preprocess_loop(hub, tmp_path)
    batching = threading.Thread(target=preprocessor.run, daemon=True)
    actor = RunningActor(hub, tmp_path)
    trainer = Trainer(hub, steps, actor, lambda: preprocessor._batcher.is_full)
    parts = actor.actor
    assert parts.pause_answers is not None
    async with asyncio.timeout(3 * LIMIT_S), asyncio.TaskGroup() as tasks:
        helpers = [
            tasks.create_task(parts._follow("trainer", "finetune_0", TrainerMessage, parts._on_trainer_message)),
            tasks.create_task(parts._follow("fates", "preprocessor_0", FateRecord, parts._on_fate)),
            tasks.create_task(parts._follow("turns", "finetune_0", PauseRequest, parts._on_pause_request)),
            tasks.create_task(parts._answer_pauses(parts.pause_answers)),
        ]
        batching.start()
        trainer.start()
        running = tasks.create_task(actor.groups.run())
        while not running.done():
            assert trainer.failure is None, repr(trainer.failure)
            await asyncio.sleep(0.05)
        for helper in helpers:
            helper.cancel()
    await actor.close()
    await asyncio.to_thread(trainer.join, LIMIT_S)
    await asyncio.to_thread(batching.join, LIMIT_S)
    assert not trainer.is_alive() and not batching.is_alive()
    preprocessor.close()
    assert (trainer.failure, trainer.paused) == (None, list(range(1, steps + 1)))
    ledger = build_ledger(read_records(hub))
    assert ledger.faults == [] and ledger.lineage.last_step == steps
