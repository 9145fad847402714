"""Servers that leave, come back and join: who gets rollouts, and what happens to the running ones."""

from __future__ import annotations

import asyncio

import pytest
from fakes.made_up_rollouts import HeldRollouts, rollout, settle

from pipelinerl.actor import membership as membership_module
from pipelinerl.actor.membership import Membership
from pipelinerl.actor.progress import Changes
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.worker_messages import Answer, RolloutEnded, RolloutFailed
from pipelinerl.records import PoolChange, ServerReady

INCARNATION = 2


class Scene:
    """Two servers with two slots each."""

    def __init__(self) -> None:
        self.workers = HeldRollouts()
        self.scheduler = Scheduler(2, 2, self.workers, 60, 0, Changes())
        urls = {"a": "http://a", "b": "http://b"}
        self.members = Membership(urls, self.scheduler, self.workers, "token", INCARNATION)  # type: ignore[arg-type]

    @property
    def busy(self) -> list[int]:
        return [server.running for server in self.scheduler.servers]

    @property
    def usable(self) -> list[str]:
        names, servers = self.members._members, self.scheduler.servers
        return [name for name, member in names.items() if servers[member.index].usable]

    def change(self, name: str, event: str, generation: int, incarnation: int = INCARNATION) -> None:
        self.members.apply_change(
            PoolChange(
                name=name,
                url=f"http://{name}",
                event=event,  # type: ignore[arg-type]
                generation=generation,
                time=0,
                incarnation=incarnation,
            )
        )

    def ready(self, name: str, generation: int) -> None:
        self.members.apply_answer(
            ServerReady(name=name, generation=generation, version=3, time=0, incarnation=INCARNATION)
        )

    async def start(self, count: int) -> list[asyncio.Task[Answer]]:
        tasks = [asyncio.create_task(self.scheduler.run(rollout(index))) for index in range(count)]
        await settle()
        return tasks


async def test_rollouts_of_a_lost_server_run_again_elsewhere_and_lose_no_try() -> None:
    scene = Scene()
    tasks = await scene.start(3)
    assert scene.busy == [2, 1]
    scene.change("a", "down", 0)
    assert scene.usable == ["b"]
    await settle()
    assert scene.busy == [0, 2] and not any(task.done() for task in tasks)  # one waits for a slot
    for _ in range(3):
        await scene.workers.end(*scene.workers.on_server(1)[:1])
    assert all(isinstance(answer, RolloutEnded) for answer in await asyncio.gather(*tasks))
    assert scene.scheduler.retries == 2 + 3 and scene.busy == [0, 0]


async def test_rollouts_wait_for_the_return_of_the_only_server() -> None:
    scene = Scene()
    scene.change("b", "down", 0)
    (task,) = await scene.start(1)
    scene.change("a", "down", 0)
    await settle()
    assert scene.busy == [0, 0] and scene.usable == [] and not scene.scheduler.has_free_slot
    scene.change("a", "up", 1)
    assert scene.usable == []  # it has no weights yet
    scene.ready("a", 1)
    await settle()
    await scene.workers.end(*scene.workers.on_server(0))
    assert isinstance(await task, RolloutEnded)


@pytest.mark.parametrize("answer_first", [False, True])
async def test_only_the_newest_start_counts(answer_first: bool) -> None:
    scene = Scene()
    scene.ready("a", 0)
    scene.change("a", "down", 0)
    scene.ready("a", 0)  # sent before the trainer knew
    assert scene.usable == ["b"]
    steps = [lambda: scene.change("a", "up", 1), lambda: scene.ready("a", 1)]
    for step in reversed(steps) if answer_first else steps:
        step()
    assert scene.usable == ["a", "b"]
    scene.change("b", "down", 0, incarnation=INCARNATION - 1)
    assert scene.usable == ["a", "b"]


async def test_a_failure_that_the_loss_explains_costs_no_try_either() -> None:
    scene = Scene()
    (task,) = await scene.start(1)
    scene.workers.running.pop("0-0/r0")[1].set_result(RolloutFailed(0, "refused", "", transient=True))
    scene.change("a", "down", 0)
    await settle()
    assert scene.workers.on_server(1) == ["0-0/r0"]
    await scene.workers.end("0-0/r0")
    assert isinstance(await task, RolloutEnded)


async def test_servers_that_join_are_made_known_before_they_get_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def longest(urls: list[str], token: str) -> int:
        assert token == "token"
        return 1024

    monkeypatch.setattr(membership_module, "fetch_max_model_len", longest)
    scene = Scene()
    scene.change("c", "up", 0)  # before the workers are ready
    await scene.members.begin()
    urls = ["http://a", "http://b", "http://c", "http://d"]
    assert [(told.urls, told.max_model_len) for told in scene.workers.told] == [(urls[:3], 1024)]
    scene.change("d", "up", 0)
    assert scene.workers.told[-1].urls == urls
    assert scene.scheduler.total_slots == 8 and scene.usable == ["a", "b"]
    scene.ready("c", 0)
    scene.ready("d", 0)
    assert scene.usable == ["a", "b", "c", "d"]
    tasks = await scene.start(4)
    assert scene.busy == [1, 1, 1, 1]
    scene.change("c", "removed", 0)
    assert scene.usable == ["a", "b", "d"] and len(scene.workers.on_server(2)) == 1  # it may end where it is
    await scene.workers.end(*scene.workers.running)
    assert all(isinstance(answer, RolloutEnded) for answer in await asyncio.gather(*tasks))
