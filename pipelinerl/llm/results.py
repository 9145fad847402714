"""Checks and sums up what a user's rollout function returned. Pure; called by the rollout worker."""

from __future__ import annotations

import inspect
import math
from typing import Any

from pipelinerl.errors import DomainError
from pipelinerl.llm.sample_builder import checked_reward
from pipelinerl.records import RolloutSummary
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText


def check_result(result: Any, function: Any) -> RolloutResult:
    """Return `result` if it is a `RolloutResult` with texts and metrics.

    Raises:
        DomainError: it is something else: user code has to be changed, and the run ends.
    """
    if not isinstance(result, RolloutResult):
        missing = " Is a `return` missing?" if result is None else ""
        raise DomainError(
            f"actor.rollout_policy: {_name_of(function)} returned {_shown(result)}, expected a RolloutResult "
            f"(from pipelinerl.rollouts).{missing} "
            "Return RolloutResult(training_texts=[...], metrics=BaseMetrics(...))."
        )
    if not isinstance(result.metrics, BaseMetrics):
        raise DomainError(
            f"actor.rollout_policy: {_name_of(function)} returned metrics of type {type(result.metrics).__name__}, "
            "expected BaseMetrics (from pipelinerl.rollouts) or a subclass of it."
        )
    texts = result.training_texts
    if not isinstance(texts, list | tuple) or not all(isinstance(text, TrainingText) for text in texts):
        raise DomainError(
            f"actor.rollout_policy: {_name_of(function)} returned training_texts {_shown(texts)}, expected a list of "
            "TrainingText. Make them with make_training_text(llm, llm_call)."
        )
    return result


def summarize(result: RolloutResult, rollout_id: str, output_tokens: int) -> RolloutSummary:
    """Return the numbers of a rollout; metrics that are not finite numbers are left out.

    Raises:
        RolloutError: `bad_reward`, when the reward in the metrics is not a finite number.
    """
    metrics = {}
    for name, value in _values_of(result.metrics).items():
        if name not in ("reward", "success") and isinstance(value, bool | int | float) and math.isfinite(value):
            metrics[name] = float(value)
    return RolloutSummary(
        rollout_id=rollout_id,
        reward=checked_reward(result.metrics.reward),
        success=bool(result.metrics.success),
        num_samples=len(result.training_texts),
        output_tokens=output_tokens,
        latency_s=float(result.latency or 0.0),
        metrics=metrics,
    )


def num_output_tokens(texts: list[TrainingText]) -> int:
    """Return the sampled tokens of all texts."""
    return sum(text.output_tokens for text in texts)


def version_range(texts: list[TrainingText]) -> tuple[int, int] | None:
    """Return the oldest and the newest policy version that sampled a token, or None without any token."""
    versions = [span.version for text in texts for span in text.version_spans]
    return (min(versions), max(versions)) if versions else None


def _name_of(function: Any) -> str:
    """Return the function's name and where it is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(function, '__name__', type(function).__name__)}{where}"


def _values_of(metrics: BaseMetrics) -> dict[str, Any]:
    """Return all values of `metrics`; a computed field is known to pydantic only, which takes longer."""
    if type(metrics).model_computed_fields:
        return metrics.model_dump()
    return {**metrics.__dict__, **(metrics.__pydantic_extra__ or {})}


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]} (a {type(value).__name__})" if value is not None else "None"
