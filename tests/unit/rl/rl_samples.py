"""Small hand-made samples for the tests of `pipelinerl.rl`."""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.records import IGNORED_LABEL, Sample, ScoredSample, VersionSpan


def make_sample(
    prompt: list[int],
    output: list[int],
    *,
    sample_id: str = "0-0/r0/s0",
    reward: float = 1.0,
    logprobs: list[float] | None = None,
    ref_logprobs: list[float] | None = None,
    spans: list[tuple[int, int, int]] | None = None,
    finished: bool = True,
    finish_reason: str = "stop",
) -> Sample:
    group_id, rollout, _ = sample_id.split("/")
    return Sample(
        id=sample_id,
        group_id=group_id,
        rollout_id=f"{group_id}/{rollout}",
        input_ids=[*prompt, *output],
        labels=[*[IGNORED_LABEL] * len(prompt), *output],
        logprobs=logprobs if logprobs is not None else [-0.5] * len(output),
        ref_logprobs=ref_logprobs or [],
        reward=reward,
        finished=finished,
        finish_reason=finish_reason,
        prompt_tokens=len(prompt),
        output_tokens=len(output),
        version_spans=[VersionSpan(*span) for span in (spans or [(0, 0, len(output))])],
    )


def scored(sample: Sample, advantages: list[float] | float = 1.0, token_rewards: Sequence[float] = ()) -> ScoredSample:
    values = advantages if isinstance(advantages, list) else [advantages]
    return ScoredSample(sample=sample, advantages=values, token_rewards=list(token_rewards))
