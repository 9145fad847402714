"""One rollout of an environment of the package verifiers. Called by the actor; waits for model, environment and rubric.

The environment asks the model through the recording endpoint for black-box agents, so its code is used as it is.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from pipelinerl.agents import black_box
from pipelinerl.domains.verifiers.environment import environment_of
from pipelinerl.domains.verifiers.score import plain_state, score_state
from pipelinerl.grading import verify

_MODEL = "actor"


async def _rollout(base_url: str, api_key: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
    # In a thread, because the first call in a process makes the environment.
    environment = await asyncio.to_thread(environment_of, problem["env_id"], problem["env_args"])
    # The endpoint is plain HTTP on loopback: loading certificates for each rollout would be for nothing.
    http_client = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=None, http_client=http_client
    ) as client:
        state = await environment.rollout(problem["row"], client, _MODEL, dict(environment.sampling_args))
    if state["error"] is not None:
        raise state["error"]
    if problem["score_in"] == "worker":
        grade = await score_state(environment, problem, state)
    else:
        path = "pipelinerl.domains.verifiers.score.score_verifiers"
        timeout_s = float(problem["score_timeout_s"])
        grade = await verify(path, "", problem, timeout_s=timeout_s, state=plain_state(state))
    ended = {"success": float(grade.status == "correct"), "overflow": float(bool(state["is_truncated"]))}
    return grade.score, {**grade.details, **ended}


generate_verifiers_rollout = black_box(_rollout)
