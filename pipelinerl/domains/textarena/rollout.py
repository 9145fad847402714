"""One match of a textarena game. Called by the actor; waits for model and game."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.text_game import play
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_textarena_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Play one match; the reward is the one at its end."""
    return await play(cfg, llm, problem, session, "pipelinerl.domains.textarena.game.TextArenaGame")
