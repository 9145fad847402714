"""Slots, retries on other servers, refused connections, pauses for weight updates; no process and no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fakes.made_up_rollouts import HeldRollouts, InstantRollouts, ended, rollout, settle

from pipelinerl.actor import scheduler as scheduler_module
from pipelinerl.actor.progress import Changes
from pipelinerl.actor.scheduler import SERVER_LOST, Scheduler
from pipelinerl.actor.worker_messages import (
    Answer,
    RolloutEnded,
    RolloutFailed,
    StartRollout,
)


def scheduler_of(runner: Any, servers: int = 1, slots: int = 1, max_retries: int = 0) -> Scheduler:
    return Scheduler(servers, slots, runner, 60, max_retries, Changes())


def busy(scheduler: Scheduler) -> list[int]:
    return [server.running for server in scheduler.servers]


class Running:
    """A scheduler whose rollouts the test ends."""

    def __init__(self, servers: int = 1, slots: int = 2) -> None:
        self.rollouts = HeldRollouts()
        self.scheduler = scheduler_of(self.rollouts, servers, slots)
        self.tasks: list[asyncio.Task[Answer]] = []

    async def start(self, *indices: int, evaluation: bool = False) -> None:
        self.tasks += [asyncio.create_task(self.scheduler.run(rollout(index, evaluation))) for index in indices]
        await settle()

    @property
    def running(self) -> list[str]:
        return [rollout_id.rpartition("/")[2] for rollout_id in self.rollouts.running]

    async def end(self, *indices: int) -> None:
        await self.rollouts.end(*(f"0-0/r{index}" for index in indices))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_the_least_busy_server_is_used_and_the_rest_wait_in_line() -> None:
    run = Running(servers=2)
    await run.start(0, 1, 2, 3)
    assert run.rollouts.on_server(0) == ["0-0/r0", "0-0/r2"] and run.rollouts.on_server(1) == ["0-0/r1", "0-0/r3"]
    assert not run.scheduler.has_free_slot
    await run.start(4, 5)
    await run.end(1)
    assert "0-0/r4" in run.rollouts.on_server(1) and "r5" not in run.running
    run.tasks[5].cancel()
    await settle()
    await run.end(0)
    assert busy(run.scheduler) == [1, 2] and run.scheduler.has_free_slot
    await run.close()
    assert busy(run.scheduler) == [0, 0]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_slot_freed_as_its_waiters_are_cancelled_is_not_lost(cancel_first: bool) -> None:
    run = Running(slots=1)
    await run.start(0, 1, 2)
    if not cancel_first:
        run.rollouts.running.pop("0-0/r0")[1].set_result(ended())
        await asyncio.sleep(0)
    for task in run.tasks:
        task.cancel()
    await asyncio.gather(*run.tasks, return_exceptions=True)
    assert busy(run.scheduler) == [0] and run.scheduler.has_free_slot
    await run.start(3)
    assert run.running[-1] == "r3"
    await run.close()


async def test_r3_a_transient_failure_is_tried_again_on_another_server() -> None:
    answers = [RolloutFailed(0, "http_503", "", transient=True, requests=1, retries=3), ended()]
    runner = InstantRollouts(lambda start: answers.pop(0))
    scheduler = scheduler_of(runner, servers=2, max_retries=3)
    assert isinstance(await scheduler.run(rollout()), RolloutEnded)
    assert [start.server for start in runner.starts] == [0, 1]
    assert (scheduler.retries, busy(scheduler)) == (5, [0, 0])


@pytest.mark.parametrize(("transient", "tries"), [(True, 3), (False, 1)])
async def test_r3_tries_are_capped_and_lasting_failures_are_final(transient: bool, tries: int) -> None:
    runner = InstantRollouts(lambda start: RolloutFailed(0, "x", "", transient=transient))
    assert isinstance(await scheduler_of(runner, max_retries=2).run(rollout()), RolloutFailed)
    assert len(runner.starts) == tries


REFUSED = RolloutFailed(0, "refused", "", transient=True, retries=3)
OWN_FAULT = RolloutFailed(0, "cannot_connect", "Too many open files", transient=True, retries=3)
LOST = RolloutFailed(0, SERVER_LOST, "", transient=True)
TRANSIENT = RolloutFailed(0, "x", "", transient=True)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs one rollout whose tries take `seconds` each and have these answers; returns how it ended and the rest."""
    now = [100.0]
    monkeypatch.setattr(scheduler_module, "monotonic", lambda: now[0])

    async def run(answers: list[Answer], seconds: float = 50.0, max_retries: int = 0) -> tuple[Answer, list[Answer]]:
        def answer(start: StartRollout) -> Answer:
            now[0] += seconds
            return answers.pop(0)

        return await scheduler_of(InstantRollouts(answer), max_retries=max_retries).run(rollout()), answers

    return run


@pytest.mark.parametrize(
    ("answers", "max_retries", "left"),
    [
        # Refused for nothing at 102, 104 ... 160, as its engine may have died; the tries at 162 and 164 count.
        ([REFUSED] * 40, 1, 8),
        # Only connections that were refused are forgiven.
        ([REFUSED, *[TRANSIENT] * 4], 1, 2),
    ],
)
async def test_r3_a_refusing_server_costs_no_tries_for_a_while(
    play: Any, answers: list[Answer], max_retries: int, left: int
) -> None:
    answer, rest = await play(list(answers), seconds=2.0, max_retries=max_retries)
    assert isinstance(answer, RolloutFailed) and len(rest) == left


async def test_r3_a_lost_server_starts_anew(play: Any) -> None:
    """Its next process may die too, before it has answered any rollout."""
    answer, rest = await play([REFUSED, LOST, REFUSED, REFUSED, ended()])
    assert isinstance(answer, RolloutEnded) and not rest


async def test_r3_faults_of_this_machine_cost_tries_and_say_nothing_about_the_server(play: Any) -> None:
    """Too many open files is not waited for like a restarting server, nor does it end such a wait."""
    answer, _ = await play([OWN_FAULT, OWN_FAULT], max_retries=1)
    assert answer is OWN_FAULT
    answer, rest = await play([REFUSED, OWN_FAULT, REFUSED], max_retries=1)
    assert isinstance(answer, RolloutFailed) and not rest


@pytest.mark.parametrize(("client_retries", "slept"), [(0, [0.125, 0.25, 0.5, 1.0, 2.0]), (3, [])])
async def test_refusals_without_a_pause_of_the_client_do_not_spin(
    monkeypatch: pytest.MonkeyPatch, client_retries: int, slept: list[float]
) -> None:
    sleeps, sleep = [], asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:
            sleeps.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    answers = [RolloutFailed(0, "refused", "", transient=True, retries=client_retries)] * 5 + [ended()]
    answer = await scheduler_of(InstantRollouts(lambda start: answers.pop(0))).run(rollout())
    assert isinstance(answer, RolloutEnded) and sleeps == slept


async def test_running_rollouts_end_and_others_wait_for_the_update() -> None:
    run = Running(slots=3)
    await run.start(0, 1)
    run.scheduler.pause(7)
    await run.start(2)
    assert run.scheduler.quiet.empty() and run.running == ["r0", "r1"] and not run.scheduler.has_free_slot
    await run.end(0)
    assert run.scheduler.quiet.empty()
    await run.end(1)
    assert run.scheduler.quiet.get_nowait() == 7 and run.running == []
    run.scheduler.weights_served(6)
    await settle()
    assert run.running == [], "an older version is not what was waited for"
    run.scheduler.weights_served(7)
    await settle()
    assert run.running == ["r2"] and run.scheduler.quiet.empty()
    await run.close()


async def test_evaluations_use_the_slots_that_a_pause_leaves() -> None:
    run = Running(slots=1)
    await run.start(0, 1)
    run.scheduler.pause(1)
    await run.end(0)
    assert run.scheduler.quiet.get_nowait() == 1 and run.running == []
    await run.start(2, evaluation=True)
    assert run.running == ["r2"]
    await run.end(2)
    run.scheduler.weights_served(1)
    await settle()
    assert run.running == ["r1"]
    await run.close()


async def test_holders_keep_updates_away_and_wait_for_one_in_progress() -> None:
    scheduler = scheduler_of(HeldRollouts())
    entered = asyncio.Event()

    async def hold() -> None:
        async with scheduler.hold_updates():
            entered.set()
            await asyncio.Event().wait()

    scheduler.pause(1)
    holder = asyncio.create_task(hold())
    await settle()
    assert scheduler.quiet.get_nowait() == 1 and not entered.is_set()
    scheduler.weights_served(1)
    await settle()
    scheduler.pause(2)
    assert entered.is_set() and scheduler.quiet.empty()
    holder.cancel()
    await settle()
    assert scheduler.quiet.get_nowait() == 2


async def test_how_busy_servers_were_between_two_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(scheduler_module, "monotonic", lambda: now[0])
    run = Running(servers=2)
    now[0] = 3.0
    await run.start(0, 1, 2)
    now[0] = 7.0
    await run.end(0)
    now[0] = 8.0
    await run.end(1)
    now[0] = 10.0
    # Server 0: 3 s with none, 4 s with two, 3 s with one; server 1: 3 s with none, 5 s with one, 2 s with none.
    report = run.scheduler.report()
    assert (report["actor/server_idle_s_0"], report["actor/server_load_0"]) == (3.0, 1.1)
    assert (report["actor/server_idle_s_1"], report["actor/server_load_1"]) == (5.0, 0.5)
    assert (report["actor/server_busy_0"], report["actor/server_busy_1"]) == (1.0, 0.0)
    run.scheduler.add_server()
    now[0] = 12.0
    report = run.scheduler.report()
    assert (report["actor/server_idle_s_0"], report["actor/server_load_0"]) == (0.0, 1.0)
    assert (report["actor/server_idle_s_2"], report["actor/server_load_2"]) == (2.0, 0.0)
    assert run.scheduler.report()["actor/server_load_0"] == 0.0
    await run.close()
