"""Short samples and other records with plain values, where a test needs any at all."""

from __future__ import annotations

from typing import Any

from pipelinerl.records import (
    EvaluationResult,
    EvaluationSample,
    Fate,
    FateRecord,
    RolloutSummary,
    Sample,
    StepDone,
    VersionSpan,
)
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


def rollout_summary(rollout_id: str = "", reward: float = 1.0, **changes: Any) -> RolloutSummary:
    """A rollout of one sample, with success if its reward is positive."""
    fields: dict[str, Any] = {"success": reward > 0, "num_samples": 1, "output_tokens": 3, "latency_s": 1.0}
    return RolloutSummary(rollout_id=rollout_id, reward=reward, **fields | changes)


def evaluation_sample(name: str, prompt: list[int], answer: list[int], **changes: Any) -> EvaluationSample:
    """Sample `GROUP/ROLLOUT/SAMPLE` of an evaluation."""
    fields: dict[str, Any] = {
        **{"group_id": name.rpartition("/")[0].rpartition("/")[0], "rollout_id": name.rpartition("/")[0]},
        **{"input_ids": [*prompt, *answer], "labels": [*[-100] * len(prompt), *answer], "reward": 1.0},
        **{"finished": True, "finish_reason": "stop", "prompt_tokens": len(prompt), "output_tokens": len(answer)},
        "version_spans": [],
    }
    return EvaluationSample(id=name, **fields | changes)


def fate_record(fate: Fate, *sample_ids: str, **changes: Any) -> FateRecord:
    fields: dict[str, Any] = {"reason": "r", "version": 0, "group_id": "g", "source": "x"}
    return FateRecord(sample_ids=list(sample_ids), fate=fate, **fields | changes)


def step_done(step: int, time: float = 0.0, samples: int = 2, incarnation: int = 0) -> StepDone:
    """`samples_processed` counts as if all steps had been as large."""
    return StepDone(
        step=step,
        time=time,
        group_ids=[],
        num_samples=samples,
        samples_processed=samples * step,
        incarnation=incarnation,
    )


def encode(record: Any) -> bytes:
    """The line of a record in its stream."""
    return RecordCodec[Any](type(record)).encode(record)
