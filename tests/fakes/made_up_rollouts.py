"""Made-up rollouts, in place of the worker pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy

from fakes.crash_run import made_up_sample
from msgspec.structs import replace

from pipelinerl.actor.scheduler import SERVER_LOST
from pipelinerl.actor.worker_messages import (
    Answer,
    RolloutEnded,
    RolloutFailed,
    Servers,
    StartRollout,
)
from pipelinerl.domains.user_task import Problem
from pipelinerl.records import RolloutSummary

PROBLEM = Problem(id="p", dataset_name="train", data={"question": 1})


def ended(
    rollout_id: str = "0-0/r0",
    reward: float = 1.0,
    versions: tuple[int, int] | None = (3, 4),
    num_samples: int = 1,
    dataset_name: str | None = None,
    **metrics: float,
) -> RolloutEnded:
    group_id, _, index = rollout_id.rpartition("/r")
    sample = made_up_sample(group_id or "0-0", int(index), 0, 0, reward)
    samples = [replace(sample, id=f"{rollout_id}/s{number}") for number in range(num_samples)]
    summary = RolloutSummary(
        rollout_id=rollout_id,
        reward=reward,
        success=reward > 0.5,
        num_samples=num_samples,
        output_tokens=5,
        latency_s=1,
        metrics=metrics,
    )
    low, high = versions or (None, None)
    return RolloutEnded(0, samples, summary, dataset_name, low, high, requests=2, retries=1)


def rollout(index: int = 0, evaluation: bool = False) -> StartRollout:
    return StartRollout(f"0-0/r{index}", "0-0", PROBLEM.data, seed=index, evaluation=evaluation)


async def settle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(10):
        await asyncio.sleep(0)


class InstantRollouts:
    """Every rollout ends at once with `answer(start)`."""

    def __init__(self, answer: Callable[[StartRollout], Answer] = lambda start: ended(start.rollout_id)) -> None:
        self._answer = answer
        self.starts: list[StartRollout] = []

    async def run(self, start: StartRollout, timeout_s: float) -> Answer:
        self.starts.append(start)
        await asyncio.sleep(0)
        return self._answer(start)


class HeldRollouts:
    """Rollouts run until the test ends them, or until their server is lost."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[StartRollout, asyncio.Future[Answer]]] = {}
        self.told: list[Servers] = []

    async def run(self, start: StartRollout, timeout_s: float) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.running[start.rollout_id] = start, answer
        return await answer

    def on_server(self, server: int) -> list[str]:
        return [rollout_id for rollout_id, (start, _) in self.running.items() if start.server == server]

    async def end(self, *rollout_ids: str, answer: Answer | None = None) -> None:
        for rollout_id in rollout_ids:
            self.running.pop(rollout_id)[1].set_result(answer or ended(rollout_id))
        await settle()

    def fail_rollouts_of(self, server: int) -> int:
        lost = self.on_server(server)
        for rollout_id in lost:
            self.running.pop(rollout_id)[1].set_result(RolloutFailed(0, SERVER_LOST, "", transient=True))
        return len(lost)

    def set_servers(self, servers: Servers) -> None:
        self.told.append(deepcopy(servers))

    async def wait_ready(self, servers: Servers) -> None:
        self.told.append(deepcopy(servers))
