"""Plays any game that takes text and gives text with a model: the rollout of the adapters for environment packages.

Called by the rollout functions of `gymnasium_text` and `textarena`. The game's own code runs in a thread, since it may
block; waits for it and for the model, turn by turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from omegaconf import DictConfig

from pipelinerl.errors import RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


@dataclass(frozen=True)
class GameStep:
    """What came of an action: the next text for the model, the reward of this step, and whether the game is over."""

    observation: str
    reward: float
    done: bool
    valid: bool = True


class TextGame(Protocol):
    """A game in progress."""

    def start(self) -> str: ...

    def act(self, action: str) -> GameStep: ...

    def close(self) -> None: ...


async def play(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
    make_game: Callable[[], TextGame],
) -> RolloutResult:
    """Play one game of at most `problem["max_turns"]` turns; its reward is the sum over steps.

    A success is a reward of at least `problem["success_reward"]`. A game that outgrows the model's context ends there.
    """
    started = time.monotonic()
    system = cfg.actor.system_prompt
    chat = llm.chat(session, messages=[{"role": "system", "content": system}] if system else [])
    game = await asyncio.to_thread(make_game)
    reward, valid, done, overflow = 0.0, True, False, False
    try:
        observation = await asyncio.to_thread(game.start)
        for _ in range(int(problem["max_turns"])):
            try:
                call = await chat.ask(observation)
            except RolloutError as error:
                if error.reason != "context_overflow" or not chat.turns:
                    raise
                overflow = True
                break
            step = await asyncio.to_thread(game.act, call.output.content or "")
            reward += step.reward
            valid = valid and step.valid
            observation, done = step.observation, step.done
            if done:
                break
    finally:
        await asyncio.to_thread(game.close)
    metrics = BaseMetrics(
        reward=reward,
        success=reward >= float(problem["success_reward"]),
        no_error=valid,
        no_answer=not valid,
        **{"turns": len(chat.turns), "ended": float(done), "overflow": float(overflow)},
    )
    return RolloutResult(
        training_texts=chat.training_texts(reward),
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem["dataset"],
    )


def seeded_problems(
    domain: str, dataset_names: list[str], sizes: dict[str, int], seed: int, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return problems that differ by the seed of their game; training and test seeds are far apart."""
    first = {"train": seed, "test": seed + 1_000_000_000}
    return [
        {
            "id": f"{domain}-{common['env_id']}-{first[name] + index}",
            "dataset": name,
            "seed": first[name] + index,
            **common,
        }
        for name in dataset_names
        for index in range(sizes[name])
    ]
