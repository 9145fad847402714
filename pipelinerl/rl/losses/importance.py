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

from pipelinerl.config.algorithm import (
    GeometricMaskCorrection,
    IcepopCorrection,
    MaskCorrection,
    NoCorrection,
    TruncateCorrection,
)
from pipelinerl.rl.losses.base import MAX_LOG_RATIO, LossInputs, Metrics

Correction = NoCorrection | TruncateCorrection | GeometricMaskCorrection


def correct(inputs: LossInputs, config: Correction) -> tuple[LossInputs, torch.Tensor | None, Metrics]:
    """Inputs for the policy loss, the factor of every token (None: no correction), and metrics."""
    if isinstance(config, NoCorrection):
        return inputs, None, {}
    log_rho = inputs.log_ratio().detach()
    if isinstance(config, GeometricMaskCorrection):
        rho = _of_sample(inputs.sample_mean(log_rho), inputs)
    elif config.importance_level == "sequence":
        rho = _of_sample(inputs.sample_sum(log_rho), inputs)
    else:
        rho = log_rho.exp()
    factor = _factor(rho, config)
    changed = (rho > config.importance_high) if config.importance_correction == "truncate" else (factor == 0)
    metrics = {
        "rl/importance_weight_mean": inputs.token_mean(factor),  #: mean factor of the importance correction
        #: share of tokens cut by the importance correction
        "rl/importance_cut_fraction": inputs.token_mean(changed.float()),
    }
    if not isinstance(config, GeometricMaskCorrection):
        inputs = replace(inputs, old_logprobs=inputs.new_logprobs.detach())
    return inputs, factor, metrics


def _of_sample(log_rho: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """exp of [num_segments] at every position of the sample: [R, T]."""
    return inputs.to_tokens(log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())


def _factor(rho: torch.Tensor, config: TruncateCorrection | GeometricMaskCorrection) -> torch.Tensor:
    high = config.importance_high
    if isinstance(config, IcepopCorrection):
        return torch.where((rho >= config.importance_low) & (rho <= high), rho, 0.0)
    if isinstance(config, GeometricMaskCorrection):
        return ((rho >= config.importance_low) & (rho <= high)).to(rho.dtype)
    if isinstance(config, MaskCorrection):
        return torch.where(rho <= high, rho, 0.0)
    return rho.clamp(max=high)
