"""One attempt at countdown. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.countdown.problems import question
from pipelinerl.domains.countdown.verify import verify_countdown
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_countdown_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for an expression and grade it."""
    return await answer_once(cfg, llm, problem, session, verify_countdown, task=question(problem))
