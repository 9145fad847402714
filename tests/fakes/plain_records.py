"""Records whose fields have plain values, but for those that a test is about."""

from __future__ import annotations

from typing import Any

from pipelinerl.records import EvaluationResult, EvaluationSample, Fate, FateRecord, RolloutSummary, StepDone


def evaluation_result(due: int = 0, success: float | None = 0.5, **changes: Any) -> EvaluationResult:
    """An evaluation of `test` with ten rollouts, whose reward is its success."""
    fields: dict[str, Any] = {
        **{"due_version": due, "min_version": due, "max_version": due, "is_final": False, "dataset_name": "test"},
        **{"num_rollouts": 10, "num_failed": 0, "success_rate": success, "mean_reward": success, "metrics": {}},
        **{"seconds": 1.0, "time": 0.0},
    }
    return EvaluationResult(**fields | changes)


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
