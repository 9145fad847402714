"""One attempt at calling functions. Called by the actor; waits for the model and the grader."""

from __future__ import annotations

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.fn_calling.problems import system_prompt
from pipelinerl.domains.fn_calling.verify import verify_fn_calling
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_fn_calling_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for calls and compare them.

    `custom.native_tools`: the model's chat template describes the functions, instead of a system prompt.
    `custom.partial_score`: credit for some of the calls.
    """
    native = bool(cfg.custom.get("native_tools", False))
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        verify_fn_calling,
        task=problem["task"],
        system_prompt=None if native else system_prompt(problem),
        tools=problem["tools"] if native else None,
        partial=bool(cfg.custom.get("partial_score", False)),
    )
