"""Plays any game that takes text and gives text with a model.

The game's own code may block: it runs in an environment service of the run if there is one, otherwise in a thread.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.user_task import RolloutFunction
from pipelinerl.errors import RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.sandbox.protocol import GameStep, TextGame, as_step, error_of, load_game, text_game
from pipelinerl.sandbox.services import RemoteGame, current_environments

__all__ = ["GameStep", "TextGame", "play", "seeded_problems", "text_game"]


def game_rollout(game_class: type) -> RolloutFunction:
    """Return the rollout function of a domain whose problems are played as `game_class` (see `play`)."""

    async def generate_rollout(
        cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
    ) -> RolloutResult:
        return await play(cfg, llm, problem, session, game_class)

    return generate_rollout


async def play(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
    game_class: str | type,
) -> RolloutResult:
    """Play one game of at most `problem["max_turns"]` turns; its reward is the sum over steps.

    A success is a reward of at least `problem["success_reward"]`. A game that outgrows the model's context ends there.

    Args:
        game_class: class of the game, called with the problem, or its dotted path. For an environment service it is
            marked with `@text_game` and stands at the top of a module.
    """
    started = time.monotonic()
    system = cfg.actor.system_prompt
    chat = llm.chat(session, messages=[{"role": "system", "content": system}] if system else [])
    game = await _begin(game_class, problem)
    reward, valid, done, overflow = 0.0, True, False, False
    try:
        observation = await game.start()
        for _ in range(int(problem["max_turns"])):
            try:
                call = await chat.ask(observation)
            except RolloutError as error:
                if error.reason != "context_overflow" or not chat.turns:
                    raise
                overflow = True
                break
            step = await game.act(call.graded_text)
            reward += step.reward
            valid = valid and step.valid
            observation, done = step.observation, step.done
            if done:
                break
    finally:
        await game.close()
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


async def _begin(game_class: str | type, problem: dict[str, Any]) -> RemoteGame | _LocalGame:
    environments = current_environments()
    if environments:
        path = game_class if isinstance(game_class, str) else f"{game_class.__module__}.{game_class.__qualname__}"
        return await environments.open_game(path, problem)
    made = load_game(game_class, marked=False) if isinstance(game_class, str) else game_class
    return _LocalGame(await asyncio.to_thread(made, problem))


class _LocalGame:
    """A game in threads of this process."""

    def __init__(self, game: TextGame) -> None:
        self._game = game

    async def start(self) -> str:
        return await asyncio.to_thread(self._game.start)

    async def act(self, action: str) -> GameStep:
        step = as_step(await asyncio.to_thread(self._game.act, action))
        if isinstance(step, GameStep):
            return step
        raise error_of(step)

    async def close(self) -> None:
        await asyncio.to_thread(self._game.close)


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
