"""One attempt at a puzzle. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

SYSTEM_PROMPT = "Think about the problem, then output the final answer as <answer>your answer</answer>."


async def generate_logic_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask the question as reasoning-gym words it, and grade what stands in the tags."""
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        "pipelinerl.domains.logic.verify.verify_logic",
        task=problem["question"],
        system_prompt=SYSTEM_PROMPT,
    )
