"""A sample of one prompt token and one trained one, where a test needs any sample at all."""

from __future__ import annotations

from typing import Any

from pipelinerl.records import Sample, VersionSpan


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
