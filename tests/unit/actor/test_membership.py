"""Servers that leave, come back and join: who gets rollouts, and what happens to the running ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.made_up_rollouts import HeldRollouts, attempt, settle

from pipelinerl.actor import membership as membership_module
from pipelinerl.actor.membership import Membership
from pipelinerl.actor.progress import Changes
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.worker_messages import Answer, RolloutEnded, RolloutFailed, Servers
from pipelinerl.errors import WorkerError
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
        return self.members.usable

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
        tasks = [asyncio.create_task(self.scheduler.run(attempt(index))) for index in range(count)]
        await settle()
        return tasks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - many things make it true, and each takes a turn of the loop
            await asyncio.sleep(0)


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


class Descriptions:
    """What servers answer that are asked for their longest sequence: `failures` errors first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, self.asked = 0, list[list[str]]()
        monkeypatch.setattr(membership_module, "fetch_max_model_lens", self.fetch)
        monkeypatch.setattr(membership_module, "FIRST_PAUSE_S", 0.0)

    async def fetch(self, urls: list[str], token: str) -> list[int | None]:
        self.asked.append(urls)
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise WorkerError(f"{urls[0]}/v1/models: got status 503")
        return [512 if url == "http://c" else 1024 for url in urls]


@pytest.fixture
def descriptions(monkeypatch: pytest.MonkeyPatch) -> Descriptions:
    return Descriptions(monkeypatch)


async def test_a_server_that_joins_is_described_to_the_workers_first(descriptions: Descriptions) -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as background:
        await scene.members.begin(background)
        assert scene.workers.told == [Servers([1024, 1024], ["http://a", "http://b"])]
        scene.change("c", "up", 0)
        assert scene.scheduler.total_slots == 6 and scene.usable == ["a", "b"]
        scene.ready("c", 0)
        await until(lambda: scene.usable == ["a", "b", "c"])
    assert descriptions.asked[1:] == [["http://c"]]
    assert scene.workers.told[1:] == [Servers([1024, 1024, 512], ["http://a", "http://b", "http://c"])]
    tasks = await scene.start(3)
    assert scene.busy == [1, 1, 1]
    scene.change("c", "removed", 0)
    assert scene.usable == ["a", "b"] and len(scene.workers.on_server(2)) == 1  # it may end where it is
    await scene.workers.end(*scene.workers.running)
    assert all(isinstance(answer, RolloutEnded) for answer in await asyncio.gather(*tasks))


async def test_a_server_that_joins_before_the_first_weights_is_described_later(descriptions: Descriptions) -> None:
    scene = Scene()
    scene.change("c", "up", 0)
    scene.ready("c", 0)
    async with asyncio.TaskGroup() as background:
        await scene.members.begin(background)
    assert scene.usable == ["a", "b", "c"] and descriptions.asked == [["http://a", "http://b"], ["http://c"]]


async def test_a_server_that_does_not_answer_at_once_is_asked_again(descriptions: Descriptions) -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as background:
        await scene.members.begin(background)
        descriptions.failures = 3
        scene.change("c", "up", 0)
        scene.ready("c", 0)
        scene.ready("c", 0)  # twice: one task asks all the same
    assert scene.usable == ["a", "b", "c"] and len(descriptions.asked) == 5 and len(scene.workers.told) == 2


async def test_a_server_that_never_answers_is_given_up_until_its_next_start(
    descriptions: Descriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "DESCRIBE_TIMEOUT_S", -1.0)
    scene = Scene()
    async with asyncio.TaskGroup() as background:
        await scene.members.begin(background)
        descriptions.failures = 1
        scene.change("c", "up", 0)
        scene.ready("c", 0)
        await until(lambda: not descriptions.failures)
        await settle()
        assert scene.usable == ["a", "b"]
        scene.change("c", "up", 1)
        scene.ready("c", 1)
    assert scene.usable == ["a", "b", "c"]


async def test_a_server_that_went_away_is_not_asked_any_more(descriptions: Descriptions) -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as background:
        await scene.members.begin(background)
        descriptions.failures = 10**9
        scene.change("c", "up", 0)
        scene.ready("c", 0)
        await until(lambda: len(descriptions.asked) > 3)
        scene.change("c", "down", 0)
    assert scene.usable == ["a", "b"]


async def test_a_server_that_returns_as_it_is_given_up_is_asked_again(
    descriptions: Descriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, loop, fetch = Scene(), asyncio.get_running_loop(), descriptions.fetch

    def come_back() -> None:
        scene.change("c", "up", 1)
        scene.ready("c", 1)

    def go_away() -> None:
        scene.change("c", "down", 0)
        loop.call_soon(come_back)  # after the last step of the task that asks, before its end is noticed

    async def fetch_and_lose(urls: list[str], token: str) -> list[int | None]:
        if len(descriptions.asked) == 1:
            loop.call_soon(go_away)
            descriptions.failures = 1
        return await fetch(urls, token)

    async with asyncio.TaskGroup() as background:
        await scene.members.begin(background)
        monkeypatch.setattr(membership_module, "fetch_max_model_lens", fetch_and_lose)
        scene.change("c", "up", 0)
        scene.ready("c", 0)
        await until(lambda: scene.usable == ["a", "b", "c"])
    assert len(descriptions.asked) == 3
