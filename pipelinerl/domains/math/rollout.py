"""One attempt at a problem of mathematics. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


async def generate_math_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for the final answer in `\\boxed{}` and grade it."""
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        "pipelinerl.domains.math.verify.verify_math",
        task=problem["task"],
        system_prompt=SYSTEM_PROMPT,
    )
