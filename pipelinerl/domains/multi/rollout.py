"""One attempt at a problem of a mix: that of the problem's own domain. Called by the actor; waits for it."""

from __future__ import annotations

import importlib
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_multi_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Run the domain's rollout function; its metrics are reported under the domain's name."""
    module, _, name = problem["rollout"].rpartition(".")
    generate_rollout = getattr(importlib.import_module(module), name)
    result: RolloutResult = await generate_rollout(cfg, llm, problem["problem"], session)
    result.dataset_name = problem["dataset"]
    result.domain = problem["domain"]
    return result
