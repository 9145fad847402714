"""Servers that leave, come back and join: who takes rollouts, and what becomes of the running ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import pipelinerl.actor.membership as membership_module
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, Servers, StartRollout
from pipelinerl.actor.membership import ServerMembership
from pipelinerl.actor.pool import SERVER_LOST
from pipelinerl.actor.scheduler import Attempt, Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.errors import WorkerError
from pipelinerl.records import PoolChange, RolloutSummary, ServerReady

INCARNATION = 2
PROBLEM = Problem(id="p", dataset_name="train", data={})


class FakeWorkers:
    """Rollouts run until `finish`, or until their server is given up."""

    def __init__(self) -> None:
        self.running: dict[int, list[tuple[StartRollout, asyncio.Future[RolloutEnded | RolloutFailed]]]] = {}
        self.told: list[Servers] = []
        self.started = asyncio.Event()

    async def run(self, start: StartRollout, timeout_s: float) -> RolloutEnded | RolloutFailed:
        answer: asyncio.Future[RolloutEnded | RolloutFailed] = asyncio.get_running_loop().create_future()
        self.running.setdefault(start.server, []).append((start, answer))
        self.started.set()
        return await answer

    def give_up_server(self, server: int) -> int:
        lost = self.running.pop(server, [])
        for start, answer in lost:
            answer.set_result(RolloutFailed(start.ticket, SERVER_LOST, "", transient=True))
        return len(lost)

    def set_servers(self, servers: Servers) -> None:
        self.told.append(servers)

    def finish(self, server: int) -> None:
        for start, answer in self.running.pop(server):
            summary = RolloutSummary(
                rollout_id=start.rollout_id, reward=1, success=True, num_samples=1, output_tokens=1, latency_s=1
            )
            answer.set_result(RolloutEnded(start.ticket, [], summary, None, None, None, 1, 0))


class Scene:
    """Two servers with two slots each."""

    def __init__(self) -> None:
        self.slots = ServerSlots(2, 2, on_idle=lambda: None)
        self.workers = FakeWorkers()
        urls = {"a": "http://a", "b": "http://b"}
        self.members = ServerMembership(urls, self.slots, self.workers, "token", INCARNATION)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.slots, self.workers, timeout_s=60, max_retries=0)

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

    def start(self, count: int) -> list[asyncio.Task[RolloutEnded | RolloutFailed]]:
        return [
            asyncio.create_task(self.scheduler.run(Attempt(f"g/r{index}", "g", PROBLEM, seed=index)))
            for index in range(count)
        ]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - many things make it true, and each takes a turn of the loop
            await asyncio.sleep(0)


async def test_rollouts_of_a_lost_server_are_run_again_elsewhere_and_lose_no_try() -> None:
    scene = Scene()
    tasks = scene.start(3)
    await until(lambda: [len(scene.workers.running.get(server, [])) for server in range(2)] == [2, 1])
    scene.change("a", "down", 0)
    assert scene.members.usable == ["b"]
    await until(lambda: len(scene.workers.running.get(1, [])) == 2)
    assert scene.slots.busy == [0, 2] and not any(task.done() for task in tasks)  # one waits for a slot
    scene.workers.finish(1)
    await until(lambda: len(scene.workers.running.get(1, [])) == 1)
    scene.workers.finish(1)
    answers = await asyncio.gather(*tasks)
    assert all(isinstance(answer, RolloutEnded) for answer in answers)
    assert scene.scheduler.retries == 2 and scene.slots.busy == [0, 0]


async def test_rollouts_wait_for_the_return_of_the_only_server() -> None:
    scene = Scene()
    scene.change("b", "down", 0)
    (task,) = scene.start(1)
    await until(lambda: scene.slots.busy == [1, 0])
    scene.change("a", "down", 0)
    await until(lambda: scene.slots.busy == [0, 0])
    assert scene.members.usable == [] and not scene.slots.has_idle
    scene.change("a", "up", 1)
    assert scene.members.usable == []  # it has no weights yet
    scene.ready("a", 1)
    await until(lambda: 0 in scene.workers.running)
    scene.workers.finish(0)
    assert isinstance(await task, RolloutEnded)


@pytest.mark.parametrize("answer_first", [False, True])
async def test_only_the_newest_start_counts(answer_first: bool) -> None:
    scene = Scene()
    scene.ready("a", 0)
    scene.change("a", "down", 0)
    scene.ready("a", 0)  # said before the trainer knew
    assert scene.members.usable == ["b"]
    steps = [lambda: scene.change("a", "up", 1), lambda: scene.ready("a", 1)]
    for step in reversed(steps) if answer_first else steps:
        step()
    assert scene.members.usable == ["a", "b"]
    scene.change("b", "down", 0, incarnation=INCARNATION - 1)
    assert scene.members.usable == ["a", "b"]


async def test_a_failure_that_the_loss_explains_costs_no_try_either() -> None:
    scene = Scene()
    (task,) = scene.start(1)
    await until(lambda: 0 in scene.workers.running)
    (start, answer) = scene.workers.running.pop(0)[0]
    answer.set_result(RolloutFailed(start.ticket, "refused", "", transient=True))
    scene.change("a", "down", 0)
    await until(lambda: 1 in scene.workers.running)
    scene.workers.finish(1)
    assert isinstance(await task, RolloutEnded)


async def test_a_server_that_joins_is_described_to_the_workers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    async def fetch(urls: list[str], token: str) -> Servers:
        asked.append(urls)
        return Servers([512], urls)

    monkeypatch.setattr(membership_module, "fetch_max_model_lens", fetch)
    scene = Scene()
    scene.members.begin(Servers([1024, 1024], ["http://a", "http://b"]))
    scene.change("c", "up", 0)
    assert scene.slots.total == 6 and scene.members.usable == ["a", "b"]
    scene.ready("c", 0)
    await until(lambda: scene.members.usable == ["a", "b", "c"])
    assert asked == [["http://c"]]
    assert scene.workers.told == [Servers([1024, 1024, 512], ["http://a", "http://b", "http://c"])]
    tasks = scene.start(3)
    await until(lambda: len(scene.workers.running) == 3)
    scene.change("c", "removed", 0)
    assert scene.members.usable == ["a", "b"]
    assert len(scene.workers.running[2]) == 1  # it may end where it is
    for server in range(3):
        scene.workers.finish(server)
    assert all(isinstance(answer, RolloutEnded) for answer in await asyncio.gather(*tasks))


class FailingFetch:
    """What a server that joined answers: as many errors as `failures`, then its length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.failures, self.calls = failures, 0
        monkeypatch.setattr(membership_module, "fetch_max_model_lens", self.fetch)
        monkeypatch.setattr(membership_module, "FIRST_PAUSE_S", 0.0)

    async def fetch(self, urls: list[str], token: str) -> Servers:
        self.calls += 1
        await asyncio.sleep(0)
        if self.calls <= self.failures:
            raise WorkerError(f"{urls[0]}/v1/models: status 503")
        return Servers([512], urls)


def joining_scene() -> Scene:
    scene = Scene()
    scene.members.begin(Servers([1024, 1024], ["http://a", "http://b"]))
    scene.change("c", "up", 0)
    scene.ready("c", 0)
    return scene


async def test_a_server_that_does_not_say_what_it_is_at_once_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fetch = FailingFetch(monkeypatch, failures=3)
    scene = joining_scene()
    scene.ready("c", 0)  # said twice: it is asked by one task all the same
    await until(lambda: scene.members.usable == ["a", "b", "c"])
    assert fetch.calls == 4 and len(scene.workers.told) == 1
    assert caplog.text.count("c takes no rollouts yet, it is asked again in 0 s: http://c/v1/models: status 503") == 3


async def test_a_server_that_never_says_what_it_is_is_given_up_until_its_next_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership_module, "DESCRIBE_TIMEOUT_S", -1.0)
    fetch = FailingFetch(monkeypatch, failures=1)
    scene = joining_scene()
    await until(lambda: "c takes no rollouts until its next start" in caplog.text)
    assert (fetch.calls, scene.members.usable) == (1, ["a", "b"])
    await until(lambda: not scene.members._describing)
    scene.change("c", "up", 1)
    scene.ready("c", 1)
    await until(lambda: scene.members.usable == ["a", "b", "c"])


async def test_a_server_that_went_away_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = FailingFetch(monkeypatch, failures=10**9)
    scene = joining_scene()
    await until(lambda: fetch.calls > 1)
    scene.change("c", "down", 0)
    await until(lambda: not scene.members._describing)
    assert scene.members.usable == ["a", "b"]


async def test_a_server_that_is_back_in_the_moment_in_which_it_is_given_up_is_asked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    fetch = FailingFetch(monkeypatch, failures=1)
    scene = joining_scene()

    def come_back() -> None:
        scene.change("c", "up", 1)
        scene.ready("c", 1)

    def go_away() -> None:
        scene.change("c", "down", 0)
        loop.call_soon(come_back)  # behind the last step of the task that asks, before anything hears of its end

    async def fetch_and_lose(urls: list[str], token: str) -> Servers:
        if fetch.calls == 0:
            fetch.calls += 1
            loop.call_soon(go_away)
            raise WorkerError("refused")
        return await fetch.fetch(urls, token)

    monkeypatch.setattr(membership_module, "fetch_max_model_lens", fetch_and_lose)
    await until(lambda: scene.members.usable == ["a", "b", "c"])
    assert fetch.calls == 2
