"""Scores a finished rollout with the environment's own rubric. Called in grader processes, or by the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import msgspec
from verifiers.types import State

from pipelinerl.domains.verifiers.environment import RewardFunctionError, environment_of
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade

# Of this process, or of no use to a rubric.
_NOT_SENT = ("client", "oai_tools", "sampling_args", "model")


# Environments read their data sets from caches and may lock files there.
@grader(confined=False)
def score_verifiers(text: str, problem: dict[str, Any], *, state: dict[str, Any]) -> Grade:
    """Return the rubric's reward of the plain `state` (see `plain_state`), its metrics among the details.

    Raises:
        ValueError: a reward function raised.
    """
    environment = environment_of(problem["env_id"], problem["env_args"])
    return asyncio.run(score_state(environment, problem, State(**state)))


async def score_state(environment: Any, problem: dict[str, Any], state: Any) -> Grade:
    """Return the rubric's reward of a rollout's `state`.

    Raises:
        ValueError: a reward function raised.
    """
    try:
        await environment.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
    except RewardFunctionError as error:
        raise ValueError(f"a reward function raised {error}") from error.__cause__
    reward = float(state["reward"])
    metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
    success = reward >= float(problem["success_reward"])
    details = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Grade(reward, "correct" if success else "wrong", details)


def plain_state(state: Any) -> dict[str, Any]:
    """Return the parts of a state that can be sent to another process: plain data, and answers of the model as such."""
    plain = {}
    for key, value in state.items():
        if key in _NOT_SENT:
            continue
        # A part that is something else stays here: a rubric that needs it raises, and says so.
        with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
            plain[key] = msgspec.to_builtins(value, enc_hook=_dump, str_keys=True)
    return plain


def _dump(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no plain data")
