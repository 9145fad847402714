"""One attempt at a program. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.coding.check import sandbox_endpoint
from pipelinerl.domains.coding.fusion import grading_timeout_s
from pipelinerl.domains.coding.limits import Limits
from pipelinerl.domains.coding.verify import verify_coding
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

SYSTEM_PROMPT = "Write a Python program. Put the whole program into one block between ```python and ```."
_MARGIN_S = 15.0


async def generate_coding_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for a program and run it on the tests; `custom.partial_score` gives credit for some of them."""
    endpoint, limits, num_tests = sandbox_endpoint(cfg), Limits(), len(problem["tests"])
    timeout_s = grading_timeout_s(num_tests, limits) if endpoint else num_tests * (limits.wall_s + 1)
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        verify_coding,
        task=problem["task"],
        system_prompt=SYSTEM_PROMPT,
        timeout_s=timeout_s + _MARGIN_S,
        endpoint=endpoint,
        partial=bool(cfg.custom.get("partial_score", False)),
    )
