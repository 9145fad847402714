"""One attempt at following instructions. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.ifeval.problems import question
from pipelinerl.domains.ifeval.verify import verify_ifeval
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_ifeval_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for a text and count the constraints that it meets; `custom.partial_score` gives credit for some."""
    partial = bool(cfg.custom.get("partial_score", False))
    return await answer_once(cfg, llm, problem, session, verify_ifeval, task=question(problem), partial=partial)
