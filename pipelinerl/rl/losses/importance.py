"""Correction for the gap between sampler and trainer, on top of any policy loss.

With rho = pi / mu (no gradient) by token, or by sample with `importance_level: sequence` (the product over its
trained tokens), each token's loss is multiplied by

    truncate        min(rho, importance_high)                                     TIS
    mask            rho where rho <= importance_high, else 0                      MIS
    icepop          rho where importance_low <= rho <= importance_high, else 0    arXiv 2510.18855
    geometric_mask  1 where the geometric mean of rho over the sample lies in the range, else 0

The first three carry the whole importance weight. The loss's own ratio must not count it again, so it becomes
pi / stop_gradient(pi), which is 1 with the right gradient. (Every batch is trained in exactly one optimizer step, so
the policy before the step is the policy in training, and no second forward pass is needed.) `geometric_mask` only drops
samples, and the loss keeps its ratio against the sampler.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pipelinerl.config.finetune import RLConfig
from pipelinerl.rl.losses.base import MAX_LOG_RATIO, LossInputs, Metrics


def correct(inputs: LossInputs, config: RLConfig) -> tuple[LossInputs, torch.Tensor | None, Metrics]:
    """Inputs for the policy loss, the factor of every token (None: no correction), and metrics."""
    mode = config.importance_correction
    if mode == "none":
        return inputs, None, {}
    log_rho = inputs.log_ratio().detach()
    if mode == "geometric_mask":
        rho = _of_sample(inputs.sample_mean(log_rho), inputs)
    elif config.importance_level == "sequence":
        rho = _of_sample(inputs.sample_sum(log_rho), inputs)
    else:
        rho = log_rho.exp()
    factor = _factor(mode, rho, config)
    changed = (factor == 0) if mode != "truncate" else (rho > config.importance_high)
    metrics = {
        "rl/importance_weight_mean": inputs.token_mean(factor),
        "rl/importance_cut_fraction": inputs.token_mean(changed.float()),
    }
    if mode != "geometric_mask":
        inputs = replace(inputs, old_logprobs=inputs.new_logprobs.detach())
    return inputs, factor, metrics


def _of_sample(log_rho: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """exp of [num_segments] at every position of the sample: [R, T]."""
    return inputs.to_tokens(log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())


def _factor(mode: str, rho: torch.Tensor, config: RLConfig) -> torch.Tensor:
    low, high = config.importance_low, config.importance_high
    if mode == "truncate":
        return rho.clamp(max=high)
    if mode == "mask":
        return torch.where(rho <= high, rho, 0.0)
    inside = (rho >= low) & (rho <= high)
    if mode == "icepop":
        return torch.where(inside, rho, 0.0)
    if mode == "geometric_mask":
        return inside.to(rho.dtype)
    raise ValueError(
        f"finetune.rl.importance_correction: got {mode!r}, expected none, truncate, mask, icepop or geometric_mask"
    )
