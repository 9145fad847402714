"""The denominator of the loss: the weight of each trained token of a step. No torch.

Weights belong to the whole step, so the gradient does not depend on how samples are packed, split into micro-batches,
or spread over ranks: every micro-batch adds `sum(weight * token loss)`.

| aggregation     | weight of a token of sample i in group g                                  | used by               |
|-----------------|---------------------------------------------------------------------------|-----------------------|
| sample          | 1 / B                        B = samples of the step                      | arXiv 2509.19128      |
| sample_mean     | 1 / (B * n_i)                n_i = trained tokens of the sample           | GRPO, arXiv 2402.03300|
| token           | 1 / N                        N = trained tokens of the step               | DAPO, arXiv 2503.14476|
| group           | 1 / (G * n_g)                G = groups, n_g = trained tokens of the group| ScaleRL "prompt" mean |
| constant_length | 1 / (B * L)                  L = constant_length_tokens                   | Dr. GRPO, 2503.20783  |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl.records import Sample

AGGREGATIONS = ("sample", "sample_mean", "token", "group", "constant_length")


@dataclass(frozen=True)
class StepScale:
    """Denominators of one optimizer step.

    `token_weights[i]` is the weight of every trained token of sample i; `num_tokens` counts the trained tokens of the
    step (metrics that are token means are sums of `value / num_tokens`).
    """

    token_weights: tuple[float, ...]
    num_samples: int
    num_tokens: int


def step_scale(
    samples: Sequence[Sample], aggregation: str = "sample", constant_length_tokens: int | None = None
) -> StepScale:
    """Token weights of all samples of a step (see the table above). Samples without trained tokens weigh nothing.

    Raises:
        ValueError: unknown aggregation, or `constant_length` without `constant_length_tokens`.
    """
    tokens = [sample.num_trained_tokens for sample in samples]
    groups = [sample.group_id for sample in samples]
    weights = _weights(tokens, groups, aggregation, constant_length_tokens)
    return StepScale(tuple(weights), num_samples=len(samples), num_tokens=sum(tokens))


def _weights(tokens: list[int], groups: list[str], aggregation: str, constant_length: int | None) -> list[float]:
    count = max(len(tokens), 1)
    if aggregation == "sample":
        return [1.0 / count] * len(tokens)
    if aggregation == "sample_mean":
        return [1.0 / (count * max(n, 1)) for n in tokens]
    if aggregation == "token":
        return [1.0 / max(sum(tokens), 1)] * len(tokens)
    if aggregation == "group":
        per_group: Counter[str] = Counter()
        for group, n in zip(groups, tokens, strict=True):
            per_group[group] += n
        return [1.0 / (len(per_group) * max(per_group[group], 1)) for group in groups]
    if aggregation == "constant_length":
        if constant_length is None:
            raise ValueError(
                "finetune.rl.constant_length_tokens: got null, expected a number of tokens with "
                "aggregation=constant_length. Set it to llm.parameters.max_tokens"
            )
        return [1.0 / (count * constant_length)] * len(tokens)
    raise ValueError(f"finetune.rl.aggregation: got {aggregation!r}, expected one of {', '.join(AGGREGATIONS)}")
