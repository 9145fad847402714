"""An entropy bonus that keeps the policy's entropy from staying below a target. Pure. No torch.

Called by the trainer's loop once a step. Follows the adaptive entropy control of arXiv 2505.22312, with the entropy
of the step before in place of an extra pass over the batch:

    bonus(k + 1) = c(k + 1) if e(k) <= target else 0
    c(k + 1)     = max(0, c(k) + d) if e(k) < target, max(0, c(k) - d) if e(k) > target, else c(k)

e(k): entropy per trained token at step k, nats. d: `finetune.rl.entropy_bonus_step`. c(1): `finetune.rl.entropy_bonus`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from pipelinerl.config.finetune import RLConfig

ENTROPY = "rl/entropy"
#: A diagnostic that is missing where no token was trained; sums over none are 0 in what the loss reports.
_TRAINED = "rl/entropy_estimate"


class EntropyControl(msgspec.Struct, frozen=True, kw_only=True):
    """Where the control stands; saved with the training state. `entropy` is that of the last step, None before it."""

    coefficient: float
    entropy: float | None = None

    @classmethod
    def at(cls, config: RLConfig, saved: EntropyControl | None) -> EntropyControl | None:
        """Where the control goes on behind `saved`, or begins; None without a target."""
        if config.target_entropy is None:
            return None
        return cls(coefficient=config.entropy_bonus) if saved is None else saved

    def bonus(self, config: RLConfig) -> float:
        """The coefficient of the next step's entropy term."""
        is_above = self.entropy is not None and self.entropy > _target(config)
        return 0.0 if is_above else self.coefficient

    def after(self, config: RLConfig, metrics: Mapping[str, float]) -> EntropyControl:
        """Behind a step with these metrics. One that trained nothing, or has no finite entropy, changes nothing."""
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
