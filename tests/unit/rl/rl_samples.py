"""Small hand-made samples for the tests of `pipelinerl.rl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from fakes.short_sample import short_sample

from pipelinerl.records import IGNORED_LABEL, Sample, VersionSpan
from pipelinerl.rl.diagnostics import DiagnosticsSum, StepDiagnostics
from pipelinerl.rl.loss import LossInputs
from pipelinerl.rl.microbatch import MicroBatch, collate, token_weights


def make_sample(
    prompt: list[int],
    output: list[int],
    *,
    sample_id: str = "0-0/r0/s0",
    advantage: float | None = 1.0,
    logprobs: list[float] | None = None,
    ref_logprobs: list[float] | None = None,
    spans: list[tuple[int, int, int]] | None = None,
) -> Sample:
    return short_sample(
        sample_id,
        input_ids=[*prompt, *output],
        labels=[*[IGNORED_LABEL] * len(prompt), *output],
        logprobs=logprobs if logprobs is not None else [-0.5] * len(output),
        ref_logprobs=ref_logprobs or [],
        advantage=advantage,
        prompt_tokens=len(prompt),
        output_tokens=len(output),
        version_spans=[VersionSpan(*span) for span in (spans or [(0, 0, len(output))])],
    )


def collated(
    samples: Sequence[Sample], *, packed: bool = True, aggregation: str = "sample", advantages: Sequence[float] = ()
) -> MicroBatch:
    """All `samples` in one micro-batch. `advantages`: of every trained token, in place of those of the samples."""
    weights = token_weights(samples, aggregation, 8)
    batch = collate(samples, range(len(samples)), weights=weights, packed=packed, pad_id=0)
    return replace(batch, advantages=on_trained(batch, advantages)) if advantages else batch


def on_trained(batch: MicroBatch, values: Sequence[float]) -> torch.Tensor:
    """[R, T] float32 with `values` on the trained tokens, 0 elsewhere."""
    zeros = torch.zeros(batch.mask.shape)
    return zeros.masked_scatter(batch.mask, torch.tensor(values, dtype=torch.float32)) if values else zeros


def diagnostics_of(*micro_batches: LossInputs, clamp: float = 5.0) -> StepDiagnostics:
    tokens = DiagnosticsSum(clamp)
    for inputs in micro_batches:
        tokens.add(inputs)
    return tokens.total()
