"""KL coefficient and entropy bonus of one optimizer step. No torch.

Both move linearly over training if a final value is set. With `finetune.rl.target_entropy` the bonus instead keeps the
policy's entropy from staying below a target, as in arXiv 2505.22312, with the entropy of the previous step in place of
an extra pass over the batch:

    bonus(k + 1) = c(k + 1) if e(k) <= target else 0
    c(k + 1)     = max(0, c(k) + d) if e(k) < target, max(0, c(k) - d) if e(k) > target, else c(k)

e(k): entropy per trained token at step k, nats. d: `finetune.rl.entropy_bonus_step`. c(1): `finetune.rl.entropy_bonus`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pipelinerl.config.algorithm import RLConfig

#: entropy of the policy per trained token over the whole vocabulary, nats (only with an entropy bonus or target)
ENTROPY = "rl/entropy"
# A diagnostic that is missing where no token was trained; sums over none are 0 in what the loss reports.
_TRAINED = "rl/entropy_estimate"


@dataclass(frozen=True)
class Coefficients:
    """Factors of the KL term and of the entropy bonus at one step."""

    kl: float
    entropy: float


def coefficients_at(config: RLConfig, step: int, max_steps: float) -> Coefficients:
    """KL and entropy coefficient of optimizer step `step` (from 1) without a target entropy."""
    return Coefficients(
        kl=linear_coefficient(config.kl_coef, config.final_kl_coef, step, max_steps),
        entropy=linear_coefficient(config.entropy_bonus, config.final_entropy_bonus, step, max_steps),
    )


def linear_coefficient(start: float, final: float | None, step: int, max_steps: float) -> float:
    """`start` at step 1, `final` at `max_steps` and later, a straight line between; constant if `final` is None."""
    if final is None:
        return start
    if max_steps <= 1:
        return final
    share = min(max((step - 1) / (max_steps - 1), 0.0), 1.0)
    return start + (final - start) * share


class EntropyControl(msgspec.Struct, frozen=True, kw_only=True):
    """State of the target entropy; saved in checkpoints. `entropy` is that of the last step, None before it."""

    coefficient: float
    entropy: float | None = None

    @classmethod
    def at(cls, config: RLConfig, saved: EntropyControl | None) -> EntropyControl | None:
        """`saved`, or the state before step 1; None without a target."""
        if config.target_entropy is None:
            return None
        return cls(coefficient=config.entropy_bonus) if saved is None else saved

    def bonus(self, config: RLConfig) -> float:
        """Coefficient of the entropy bonus at the next step."""
        is_above = self.entropy is not None and self.entropy > _target(config)
        return 0.0 if is_above else self.coefficient

    def after(self, config: RLConfig, metrics: Mapping[str, float]) -> EntropyControl:
        """State after a step with these metrics; unchanged if it trained nothing or its entropy is not finite."""
        entropy = metrics.get(ENTROPY, math.nan) if _TRAINED in metrics else math.nan
        if not math.isfinite(entropy):
            return self
        target = _target(config)
        change = config.entropy_bonus_step * ((entropy < target) - (entropy > target))
        return EntropyControl(coefficient=max(0.0, self.coefficient + change), entropy=entropy)


def _target(config: RLConfig) -> float:
    if config.target_entropy is None:
        raise ValueError("finetune.rl.target_entropy: got None, expected nats per token")
    return config.target_entropy
