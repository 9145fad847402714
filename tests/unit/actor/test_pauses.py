"""Draining before an update: the gate of the actor, the request of the trainer, the turns of shared devices."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.drain_requests import DrainAnswers, follow_drain_requests
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, StartRollout
from pipelinerl.actor.gate import RolloutGate
from pipelinerl.actor.scheduler import Attempt, Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.actor.trainer_state import TrainerState
from pipelinerl.config.resources import FileStreams
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.errors import StreamError
from pipelinerl.finetune.pauses import RolloutPause
from pipelinerl.records import PauseRequest, RolloutsPaused, RolloutSummary, WeightUpdateSuccess
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import TURNS_TOPIC
from pipelinerl.streams.hub import StreamHub

PROBLEM = Problem(id="p", dataset_name="train", data={})


class HeldRunner:
    """Rollouts that end when the test says so."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[None]] = {}

    async def run(self, start: StartRollout, timeout_s: float) -> RolloutEnded | RolloutFailed:
        ended = self.running[start.rollout_id] = asyncio.get_running_loop().create_future()
        await ended
        summary = RolloutSummary(
            rollout_id=start.rollout_id, reward=0, success=False, num_samples=0, output_tokens=0, latency_s=0
        )
        return RolloutEnded(0, [], summary, None, None, None)

    async def end(self, rollout_id: str) -> None:
        self.running.pop(rollout_id).set_result(None)
        await turn()


async def turn() -> None:
    """Let everything happen that can happen now."""
    for _ in range(10):
        await asyncio.sleep(0)


def attempt(rollout_id: str, evaluation: bool = False) -> Attempt:
    return Attempt(rollout_id, "g", PROBLEM, seed=0, evaluation=evaluation)


class Actor:
    """A scheduler with a gate, two slots, and what the gate answered."""

    def __init__(self, slots: int = 2) -> None:
        self.answers: list[int] = []
        self.gate = RolloutGate(self.answers.append)
        self.runner = HeldRunner()
        self.scheduler = Scheduler(ServerSlots(1, slots, lambda: None), self.runner, 60, 0, self.gate)
        self.tasks: list[asyncio.Task[RolloutEnded | RolloutFailed]] = []

    async def start(self, *attempts: Attempt) -> None:
        self.tasks += [asyncio.create_task(self.scheduler.run(item)) for item in attempts]
        await turn()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_running_rollouts_end_and_the_others_wait_for_the_update() -> None:
    actor = Actor(slots=3)
    await actor.start(attempt("a"), attempt("b"))
    actor.gate.close(7)
    await actor.start(attempt("c"))
    assert actor.answers == [] and set(actor.runner.running) == {"a", "b"}
    await actor.runner.end("a")
    assert actor.answers == []
    await actor.runner.end("b")
    assert actor.answers == [7] and actor.runner.running == {}
    actor.gate.served(6)
    await turn()
    assert actor.runner.running == {}, "an older version is not what was waited for"
    actor.gate.served(7)
    await turn()
    assert set(actor.runner.running) == {"c"} and actor.answers == [7]
    await actor.close()
    assert actor.gate.running == 0


async def test_an_idle_actor_answers_at_once_and_once() -> None:
    actor = Actor()
    actor.gate.close(3)
    actor.gate.served(3)
    with actor.gate.passing():
        pass
    assert actor.answers == [3]


async def test_a_rollout_that_waited_for_a_slot_when_the_gate_closed_starts_after_the_update() -> None:
    """It had not started, so the update does not wait for it; and it does not keep the slot that it is handed."""
    actor = Actor(slots=1)
    await actor.start(attempt("a"), attempt("b"))
    actor.gate.close(1)
    await actor.runner.end("a")
    assert actor.answers == [1] and actor.runner.running == {}
    await actor.start(attempt("e", evaluation=True))
    assert set(actor.runner.running) == {"e"}, "an evaluation takes the free slot"
    await actor.runner.end("e")
    actor.gate.served(1)
    await turn()
    assert set(actor.runner.running) == {"b"}
    await actor.close()


async def test_a_cancelled_rollout_has_left_the_gate() -> None:
    actor = Actor()
    await actor.start(attempt("a"))
    actor.gate.close(1)
    await actor.close()
    assert actor.answers == [1]


def update(version: int, incarnation: int = 1) -> WeightUpdateSuccess:
    return WeightUpdateSuccess(version=version, time=0, seconds={}, num_servers=1, incarnation=incarnation)


async def test_the_update_message_opens_the_gate() -> None:
    gate = RolloutGate(lambda version: None)
    trainer = TrainerState(SampleBudget(1, 0, 1), incarnation=1, gate=gate)
    gate.close(4)
    trainer.apply_message(update(4, incarnation=0))
    assert not gate.is_open, "another incarnation's update says nothing about these servers"
    trainer.apply_message(update(4))
    assert gate.is_open


class FakeHeartbeat:
    def waiting(self, what: str, deadline_s: float | None = None) -> nullcontext[None]:
        return nullcontext()


@pytest.fixture
def hub(tmp_path: Path) -> StreamHub:
    return StreamHub(FileStreams(), RunDir(tmp_path), "run-a")


def make_drain(hub: StreamHub, incarnation: int = 1, timeout_s: float = 60, **options: object) -> RolloutPause:
    requests = hub.writer(TURNS_TOPIC, "finetune_0", PauseRequest)
    answers = hub.reader(TURNS_TOPIC, "actor_0", RolloutsPaused)
    return RolloutPause(requests, answers, incarnation, FakeHeartbeat(), timeout_s, **options)  # type: ignore[arg-type]


async def test_request_and_answer_over_the_streams(hub: StreamHub) -> None:
    """The trainer waits in a thread while a rollout runs; old incarnations' records mean nothing on either side."""
    writer = hub.loop_writer(TURNS_TOPIC, "actor_0", RolloutsPaused)
    await writer.write(RolloutsPaused(version=9, time=0, incarnation=0))
    answers = DrainAnswers(writer, incarnation=1)
    gate = RolloutGate(answers.put)
    answering = asyncio.create_task(answers.write())
    drain = make_drain(hub)
    drain.requests.write(PauseRequest(version=99, time=0, incarnation=0))
    closed = asyncio.Event()
    close = gate.close

    def note(version: int) -> None:
        close(version)
        closed.set()

    gate.close = note  # type: ignore[method-assign]
    failures: list[BaseException] = []
    with follow_drain_requests(hub, gate, 1, failures.append):
        with gate.passing():
            waiting = asyncio.create_task(asyncio.to_thread(drain.wait, 2))
            await asyncio.wait_for(closed.wait(), 60)
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, 60) is True
    assert failures == []
    answering.cancel()
    await answers.close()


async def test_an_answer_that_cannot_be_written_ends_the_actor(hub: StreamHub) -> None:
    answers = DrainAnswers(hub.loop_writer(TURNS_TOPIC, "actor_0", RolloutsPaused), incarnation=1)
    await answers.close()
    RolloutGate(answers.put).close(1)
    with pytest.raises(StreamError, match="is closed"):
        await asyncio.wait_for(answers.write(), 60)


