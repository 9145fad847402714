"""One episode of a gymnasium environment. Called by the actor; waits for model and environment."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.text_game import play
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_gymnasium_text_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Play one episode; the reward is the sum over its steps."""
    return await play(cfg, llm, problem, session, "pipelinerl.domains.gymnasium_text.game.GymnasiumGame")
