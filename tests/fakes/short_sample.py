"""A short sample, and the result of an evaluation, where a test needs any at all."""

from __future__ import annotations

from typing import Any

from pipelinerl.records import EvaluationResult, Sample, VersionSpan
from pipelinerl.records.codec import RecordCodec


def short_sample(sample_id: str, version: int = 0, **changes: Any) -> Sample:
    """The sample of an id `group/rollout/sample`."""
    rollout_id = sample_id.rpartition("/")[0]
    fields: dict[str, Any] = dict(
        id=sample_id,
        group_id=rollout_id.rpartition("/")[0],
        rollout_id=rollout_id,
        input_ids=[1, 2],
        labels=[-100, 2],
        logprobs=[-0.5],
        reward=1.0,
        finished=True,
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=1,
        version_spans=[VersionSpan(version, 0, 1)],
    )
    return Sample(**{**fields, **changes})


def evaluation_result(due: int = 0, success_rate: float | None = None, **changes: Any) -> EvaluationResult:
    """Of 4 rollouts; version `due` sampled all of them, and the reward is the success."""
    fields: dict[str, Any] = dict(
        min_version=due,
        max_version=due,
        is_final=False,
        dataset_name="test",
        num_rollouts=4,
        num_failed=0,
        mean_reward=success_rate,
        metrics={},
        seconds=1.0,
        time=0.0,
    )
    return EvaluationResult(due_version=due, success_rate=success_rate, **{**fields, **changes})


def encode(record: Any) -> bytes:
    """The line of a record in its stream."""
    return RecordCodec[Any](type(record)).encode(record)
