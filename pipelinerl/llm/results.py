"""Checks and sums up what a user's rollout function returned. Pure; called by the rollout worker."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from typing import Any

from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm.sample_builder import checked_reward
from pipelinerl.llm.trainable import TrainableLLM
from pipelinerl.records import IGNORED_LABEL, RolloutSummary, VersionSpan
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


def complete_texts(result: RolloutResult, llm: TrainableLLM) -> None:
    """Fill in what a text that was filled by hand may leave out: its version and its temperature.

    Raises:
        RolloutError: `unversioned`, when it could be any of several versions.
    """
    bare = []
    for text in result.training_texts:
        if text.temperature is None:
            text.temperature = float(llm.parameters.get("temperature", 1.0))
        if not text.version_spans:
            bare.append(text)
    if not bare:
        return
    version = _version_of(result.model_version, llm.counters.versions)
    for text in bare:
        labels = list(text.labels)
        trained = len(labels) - labels.count(IGNORED_LABEL)
        if version is not None and trained:
            text.version_spans = [VersionSpan(version, 0, trained)]


def _version_of(stated: Any, seen: Collection[int]) -> int | None:
    """Return the version of texts without spans: the stated one, else the only one seen; None if nothing is known.

    Raises:
        RolloutError: `unversioned`: several were seen and none is stated, or one is stated that was not seen.
    """
    versions = ", ".join(map(str, sorted(seen)))
    if stated is None:
        if len(seen) > 1:
            raise RolloutError(
                "unversioned",
                f"no version spans, and the rollout's requests were answered by the versions {versions}; use "
                "make_training_text, or fill in version_spans (LLMCall has them) or RolloutResult.model_version",
            )
        return next(iter(seen), None)
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 0:
        raise RolloutError("unversioned", f"model_version is {stated!r}, expected the number of a policy version")
    if seen and stated not in seen:
        raise RolloutError(
            "unversioned",
            f"model_version is {stated}, but the rollout's requests were answered by version {versions}; leave it out",
        )
    return stated


def summarize(result: RolloutResult, rollout_id: str, output_tokens: int) -> RolloutSummary:
    """Return the numbers of a rollout; metrics that are not finite numbers are left out.

    Raises:
        RolloutError: `bad_reward`, when the reward in the metrics is not a finite number; `bad_value`, when the latency
            is not.
    """
    latency_s = float(result.latency or 0.0)
    if not math.isfinite(latency_s):
        raise RolloutError("bad_value", f"latency is {latency_s}, expected seconds")
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
        latency_s=latency_s,
        metrics=metrics,
    )


def num_output_tokens(texts: list[TrainingText]) -> int:
    """Return the sampled tokens of all texts."""
    return sum(text.output_tokens for text in texts)


def version_range(texts: list[TrainingText], seen: Collection[int] = ()) -> tuple[int, int] | None:
    """Return the oldest and the newest policy version that sampled a token, or None without any token.

    Args:
        texts: of one rollout.
        seen: the versions that answered its requests: they count where the texts name none.
    """
    versions = [span.version for text in texts for span in text.version_spans] or seen
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
