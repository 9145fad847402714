"""One attempt at counting. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.counting.problems import question
from pipelinerl.domains.counting.verify import verify_counting
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_counting_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for the number of letters and grade the answer."""
    return await answer_once(cfg, llm, problem, session, verify_counting, task=question(problem))
