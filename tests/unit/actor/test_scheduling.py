"""Slots, retries on another server, groups, and what an evaluation sums up; no process and no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from pipelinerl.actor.evaluation import EvaluationFrame, as_final, summarize_evaluation
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, StartRollout
from pipelinerl.actor.groups import run_group
from pipelinerl.actor.pool import SERVER_LOST
from pipelinerl.actor.scheduler import Attempt, Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.records import EvaluationResult, RolloutSummary, Sample, VersionSpan

PROBLEM = Problem(id="p", dataset_name="train", data={"question": 1})
Answer = RolloutEnded | RolloutFailed


def ended(
    start_id: str = "r", reward: float = 1.0, versions: tuple[int, int] | None = (3, 4), **metrics: float
) -> Answer:
    summary = RolloutSummary(
        rollout_id=start_id,
        reward=reward,
        success=reward > 0.5,
        num_samples=1,
        output_tokens=5,
        latency_s=1,
        metrics=metrics,
    )
    sample = Sample(
        id=f"{start_id}/s0",
        group_id="g",
        rollout_id=start_id,
        input_ids=[1, 2],
        labels=[-100, 2],
        logprobs=[-0.5],
        reward=reward,
        finished=True,
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=1,
        version_spans=[VersionSpan(3, 0, 1)],
    )
    low, high = versions or (None, None)
    return RolloutEnded(0, [sample], summary, None, low, high, requests=2, retries=1)


class FakeRunner:
    """Answers with `answer(start)`; notes who ran where."""

    def __init__(self, answer: Callable[[StartRollout], Answer]) -> None:
        self._answer = answer
        self.starts: list[StartRollout] = []

    async def run(self, start: StartRollout, timeout_s: float) -> Answer:
        self.starts.append(start)
        await asyncio.sleep(0)
        return self._answer(start)


def attempt(index: int = 0) -> Attempt:
    return Attempt(f"g/r{index}", "g", PROBLEM, seed=index)


async def test_the_least_busy_server_is_taken_and_the_rest_wait_in_line() -> None:
    idle: list[bool] = []
    slots = ServerSlots(2, 2, on_idle=lambda: idle.append(True))
    assert [await slots.acquire() for _ in range(4)] == [0, 1, 0, 1]
    assert not slots.has_idle
    first, second = (asyncio.create_task(slots.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    slots.release(1)
    await asyncio.sleep(0)
    assert first.done() and first.result() == 1 and not second.done()
    second.cancel()
    await asyncio.sleep(0)
    slots.release(0)
    assert slots.busy == [1, 2] and slots.has_idle and idle == [True]


async def test_a_release_between_a_cancellation_and_its_arrival() -> None:
    """All waiters are cancelled in one go while a slot comes back: nothing breaks and the slot is free again."""
    idle: list[bool] = []
    slots = ServerSlots(1, 1, on_idle=lambda: idle.append(True))
    await slots.acquire()
    waiting = [asyncio.create_task(slots.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    slots.release(0)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert slots.busy == [0] and slots.has_idle and idle == [True]
    assert await slots.acquire() == 0


async def test_a_slot_handed_to_a_cancelled_waiter_is_not_lost() -> None:
    slots = ServerSlots(1, 1, on_idle=lambda: None)
    await slots.acquire()
    waiter = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    slots.release(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert slots.busy == [0] and slots.has_idle


async def test_a_passing_failure_is_tried_again_on_another_server() -> None:
    answers = [RolloutFailed(0, "http_503", "", transient=True, requests=1, retries=3), ended()]
    runner = FakeRunner(lambda start: answers.pop(0))
    slots = ServerSlots(2, 1, on_idle=lambda: None)
    scheduler = Scheduler(slots, runner, timeout_s=10, max_retries=3)
    assert isinstance(await scheduler.run(attempt()), RolloutEnded)
    assert [start.server for start in runner.starts] == [0, 1]
    assert (scheduler.requests, scheduler.retries, slots.busy) == (3, 5, [0, 0])


@pytest.mark.parametrize(("transient", "tries"), [(True, 3), (False, 1)])
async def test_tries_are_capped_and_lasting_failures_are_final(transient: bool, tries: int) -> None:
    runner = FakeRunner(lambda start: RolloutFailed(0, "x", "", transient=transient))
    scheduler = Scheduler(ServerSlots(1, 1, lambda: None), runner, timeout_s=10, max_retries=2)
    assert isinstance(await scheduler.run(attempt()), RolloutFailed)
    assert len(runner.starts) == tries


async def test_a_group_keeps_its_good_attempts_in_order() -> None:
    def answer(start: StartRollout) -> Answer:
        if start.rollout_id.endswith("r1"):
            return RolloutFailed(0, "rollout_timeout", "")
        return ended(start.rollout_id)

    heard: list[Answer] = []
    scheduler = Scheduler(ServerSlots(1, 2, lambda: None), FakeRunner(answer), timeout_s=10, max_retries=0)
    group = await run_group(scheduler, "0-5", PROBLEM, 3, seed=1, incarnation=0, on_answer=heard.append)
    assert [rollout.rollout_id for rollout in group.record.rollouts] == ["0-5/r0", "0-5/r2"]
    assert [sample.id for sample in group.record.samples] == ["0-5/r0/s0", "0-5/r2/s0"]
    assert (group.record.failed_rollouts, len(group.failures), len(heard)) == (1, 1, 3)
    assert (group.record.problem_id, group.record.dataset_name) == ("p", "train")


def test_o2_evaluations_are_due_once_also_when_versions_jump() -> None:
    schedule = EvaluationSchedule(every_n_versions=10)
    due = [schedule.take_due(version) for version in (0, 9, 10, 11, 35, 36, 40)]
    assert due == [None, None, 10, None, 30, None, 40]
    assert EvaluationSchedule(0).take_due(100) is None
    schedule = EvaluationSchedule(10)
    schedule.start_at(25)
    assert (schedule.take_due(29), schedule.take_due(30)) == (None, 30)
    # The final evaluation measures the last version.
    schedule = EvaluationSchedule(10, last_version=30)
    assert [schedule.take_due(version) for version in (10, 21, 30)] == [10, 20, None]


FRAME = EvaluationFrame(due_version=4, versions=(4, 6), is_final=False, seconds=2.0, incarnation=0)


def test_an_evaluation_averages_what_came_to_an_end() -> None:
    problems = [PROBLEM] * 3
    (result,) = summarize_evaluation(
        problems, [ended(reward=1.0, versions=(4, 5), n=1), RolloutFailed(0, "x", ""), ended(reward=0.0, n=2)], FRAME
    )
    assert (result.num_rollouts, result.num_failed, result.success_rate, result.mean_reward) == (3, 1, 0.5, 0.5)
    assert (result.due_version, result.min_version, result.max_version) == (4, 3, 5)
    assert result.metrics == {"n": 1.5} and result.dataset_name == "train"


@pytest.mark.parametrize(
    ("due", "spans", "is_final"),
    [(6, (6, 6), True), (6, (6, 7), False), (6, (5, 6), False), (5, (5, 5), False), (5, (6, 6), False)],
)
def test_o2_an_evaluation_of_the_last_version_is_the_final_one(
    due: int, spans: tuple[int, int], is_final: bool
) -> None:
    frame = replace(FRAME, due_version=due)
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    made = summarize_evaluation(problems, [ended(versions=spans), ended(versions=spans)], frame)
    final = as_final(made, 6)
    assert bool(final) is is_final
    assert all(result.is_final and result.success_rate == 1.0 for result in final)
    assert as_final([], 6) == []


def test_several_data_sets_come_after_the_result_for_all() -> None:
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    results = summarize_evaluation(problems, [ended(versions=None), ended(reward=0.0, versions=None)], FRAME)
    assert [(r.dataset_name, r.success_rate) for r in results] == [("all", 0.5), ("b", 0.0), ("train", 1.0)]
    assert (results[0].min_version, results[0].max_version) == (4, 6)


def test_an_evaluation_in_which_everything_failed_is_over_and_has_no_averages() -> None:
    failed = RolloutFailed(0, "x", "")
    (result,) = summarize_evaluation([PROBLEM], [failed], FRAME)
    assert (result.due_version, result.num_rollouts, result.num_failed, result.dataset_name) == (4, 1, 1, "train")
    assert result.success_rate is None and result.mean_reward is None and result.metrics == {}
    assert msgspec.json.decode(msgspec.json.encode(result), type=EvaluationResult) == result
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    (of_two,) = summarize_evaluation(problems, [failed, failed], FRAME)
    assert (of_two.dataset_name, of_two.num_failed, of_two.success_rate) == ("all", 2, None)
    assert as_final(summarize_evaluation([PROBLEM], [failed], replace(FRAME, versions=(4, 4))), 4) == []


def test_a_data_set_in_which_everything_failed_has_no_result_beside_one_that_has() -> None:
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    results = summarize_evaluation(problems, [ended(), RolloutFailed(0, "x", "")], FRAME)
    assert [(r.dataset_name, r.success_rate, r.num_failed) for r in results] == [("all", 1.0, 1), ("train", 1.0, 0)]


def refused(pauses: int = 3) -> Answer:
    return RolloutFailed(0, "refused", "", transient=True, retries=pauses)


async def test_a_server_that_refuses_connections_costs_no_try_until_it_has_done_so_for_long() -> None:
    """Its engine died and its process is about to end; the launcher has not seen it yet."""
    now = [100.0]

    def refuse(start: StartRollout) -> Answer:
        now[0] += 2.0
        return refused()

    runner = FakeRunner(refuse)
    scheduler = Scheduler(ServerSlots(1, 1, lambda: None), runner, timeout_s=10, max_retries=1, clock=lambda: now[0])
    assert isinstance(await scheduler.run(attempt()), RolloutFailed)
    # Refused at 102, 104, ... 160 for nothing; the tries of 162 and 164 count.
    assert (len(runner.starts), now[0]) == (32, 164.0)


async def test_what_keeps_the_actor_from_connecting_costs_tries_and_is_no_word_of_the_server() -> None:
    """Too many open files: it is not waited for as a server that starts again is, nor does it end such a wait."""
    now = [0.0]
    own = RolloutFailed(0, "cannot_connect", "Too many open files", transient=True, retries=3)
    answers = [own, own]

    def answer(start: StartRollout) -> Answer:
        now[0] += 50.0
        return answers.pop(0)

    runner = FakeRunner(answer)
    scheduler = Scheduler(ServerSlots(1, 1, lambda: None), runner, timeout_s=10, max_retries=1, clock=lambda: now[0])
    assert await scheduler.run(attempt()) is own and not answers
    # Refused at 150 and 250: that is longer than is forgiven, whatever happened at 200.
    answers += [refused(), own, refused()]
    assert isinstance(await scheduler.run(attempt()), RolloutFailed) and not answers


async def test_a_server_that_answered_meanwhile_refuses_anew() -> None:
    now = [0.0]
    answers = [refused(), ended(), refused(), refused(), ended()]

    def answer(start: StartRollout) -> Answer:
        now[0] += 50.0
        return answers.pop(0)

    runner = FakeRunner(answer)
    scheduler = Scheduler(ServerSlots(1, 1, lambda: None), runner, timeout_s=10, max_retries=0, clock=lambda: now[0])
    assert isinstance(await scheduler.run(attempt()), RolloutEnded)
    assert isinstance(await scheduler.run(attempt()), RolloutEnded)
    assert not answers


async def test_a_rollout_that_is_refused_for_ever_ends_though_others_are_answered() -> None:
    """Its own code reports a refusal of its own: the server's answers to others say nothing about that."""
    now = [0.0]

    def answer(start: StartRollout) -> Answer:
        now[0] += 1.0
        assert now[0] < 1000, "tried for ever"
        return refused() if start.seed == 1 else ended()

    runner = FakeRunner(answer)
    scheduler = Scheduler(ServerSlots(1, 1, lambda: None), runner, timeout_s=10, max_retries=1, clock=lambda: now[0])
    task = asyncio.create_task(scheduler.run(attempt(1)))
    while not task.done():
        assert isinstance(await scheduler.run(attempt(2)), RolloutEnded)
    assert isinstance(task.result(), RolloutFailed)
    assert now[0] < 70


@pytest.mark.parametrize(("pauses", "slept"), [(0, [0.125, 0.25, 0.5, 1.0, 2.0]), (3, [])])
async def test_a_refusal_without_any_pause_of_the_client_does_not_spin(pauses: int, slept: list[float]) -> None:
    now, sleeps = [0.0], []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        now[0] += seconds

    answers = [refused(pauses)] * 5 + [ended()]
    scheduler = Scheduler(
        ServerSlots(1, 1, lambda: None),
        FakeRunner(lambda start: answers.pop(0)),
        timeout_s=10,
        max_retries=0,
        clock=lambda: now[0],
        sleep=sleep,
    )
    assert isinstance(await scheduler.run(attempt()), RolloutEnded)
    assert sleeps == slept


async def test_a_server_that_was_lost_begins_anew() -> None:
    """Its next process may die, too, before any rollout was answered."""
    now = [0.0]
    lost = RolloutFailed(0, SERVER_LOST, "", transient=True)
    answers = [refused(), lost, refused(), refused(), ended()]

    def answer(start: StartRollout) -> Answer:
        now[0] += 50.0
        return answers.pop(0)

    scheduler = Scheduler(
        ServerSlots(1, 1, lambda: None), FakeRunner(answer), timeout_s=10, max_retries=0, clock=lambda: now[0]
    )
    assert isinstance(await scheduler.run(attempt()), RolloutEnded)


async def test_what_a_tool_of_the_task_refuses_is_still_capped() -> None:
    """Only connections that the client found refused are forgiven: a failure of another kind ends that."""
    answers = [refused()] + [RolloutFailed(0, "x", "", transient=True)] * 3
    runner = FakeRunner(lambda start: answers.pop(0))
    scheduler = Scheduler(ServerSlots(1, 1, lambda: None), runner, timeout_s=10, max_retries=1)
    assert isinstance(await scheduler.run(attempt()), RolloutFailed)
    assert len(answers) == 1


async def test_occupancy_of_servers_between_two_reports() -> None:
    now = [0.0]
    slots = ServerSlots(2, 2, lambda: None, clock=lambda: now[0])
    now[0] = 3.0
    assert [await slots.acquire() for _ in range(3)] == [0, 1, 0]
    now[0] = 7.0
    slots.release(0)
    now[0] = 8.0
    slots.release(1)
    now[0] = 10.0
    # Server 0: 3 s of none, 4 s of two, 3 s of one; server 1: 3 s of none, 5 s of one, 2 s of none.
    assert slots.occupancy.take() == {
        "actor/server_idle_s_0": 3.0,
        "actor/server_load_0": 1.1,
        "actor/server_idle_s_1": 5.0,
        "actor/server_load_1": 0.5,
    }
    slots.add()
    now[0] = 12.0
    taken = slots.occupancy.take()
    assert (taken["actor/server_idle_s_0"], taken["actor/server_load_0"]) == (0.0, 1.0)
    assert (taken["actor/server_idle_s_2"], taken["actor/server_load_2"]) == (2.0, 0.0)
    assert slots.occupancy.take()["actor/server_load_0"] == 0.0
