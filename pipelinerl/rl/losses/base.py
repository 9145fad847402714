"""What a policy loss gets and what it returns.

A new loss `NAME` is a type in `config/algorithm.py` with its keys, and a file `NAME.py` next to this one with a
function `NAME(LossInputs, that type) -> LossOutputs`; docs/algorithms.md has a line for it. A loss of your own has the
same signature, gets a `CustomLoss` with your `loss_params`, and is named by its dotted path:
`finetune.rl.policy_loss=my_package.my_module.my_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from pipelinerl.rl.microbatch import MicroBatch, positions_of
from pipelinerl.rl.user_function import LOSS_API_VERSION

# exp(20) = 4.9e8: far beyond any clip range, and its square is finite in fp32.
MAX_LOG_RATIO = 20.0

# 0-d tensors without gradient, each the share of one micro-batch: added up over micro-batches and ranks.
Metrics = dict[str, torch.Tensor]

_FROM_BATCH = (
    *("old_logprobs", "advantages", "mask", "weights", "segment_ids", "versions", "oldest_versions"),
    *("num_segments", "step_tokens", "trained", "token_rewards"),
)


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch after the forward pass. Fields are only added while `api_version` stays the same.

    All token tensors are [R, T] and line up with the tokens that are predicted. `of` replaces what is not trained by
    zeros, so masked tokens give exactly zero gradient even if the model's output there is not finite.

    Attributes:
        new_logprobs: log-probs of the targets under the policy in training. Only this, `entropy` and `values` have
            gradients.
        old_logprobs: under the policy that sampled them.
        advantages, mask, weights, segment_ids: see `MicroBatch`.
        versions: policy version that sampled the token; `trainer_version` is that of the weights in training.
        num_segments: samples in the micro-batch; `step_tokens`: trained tokens of the whole step.
        ref_logprobs: of the frozen reference model, needed if the KL coefficient is not 0.
        entropy: nats per token, needed if the entropy coefficient is not 0.
        values: output of the value head before each target, needed for `gae`.
        trained: see `MicroBatch`; None: computed from `mask` when needed.
        oldest_versions: see `MicroBatch`; None: those of the tokens themselves.
        token_rewards: see `MicroBatch`; used by `gae`.
    """

    api_version: ClassVar[int] = LOSS_API_VERSION

    new_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    segment_ids: torch.Tensor
    versions: torch.Tensor
    num_segments: int
    step_tokens: int
    trainer_version: int = 0
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    trained: torch.Tensor | None = None
    oldest_versions: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        new_logprobs: torch.Tensor,
        *,
        entropy: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        trainer_version: int = 0,
    ) -> LossInputs:
        """Join a micro-batch with the model's outputs."""

        def kept(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else torch.where(batch.mask, values, torch.zeros_like(values))

        return cls(
            new_logprobs=torch.where(batch.mask, new_logprobs, torch.zeros_like(new_logprobs)),
            ref_logprobs=kept(batch.ref_logprobs),
            entropy=kept(entropy),
            values=kept(values),
            trainer_version=trainer_version,
            **{name: getattr(batch, name) for name in _FROM_BATCH},
        )

    def of_trained(self, values: torch.Tensor) -> torch.Tensor:
        """The trained tokens of `values` [R, T], as [N]."""
        trained = positions_of(self.mask) if self.trained is None else self.trained
        return values.reshape(-1).index_select(0, trained)

    def log_ratio(self, old_logprobs: torch.Tensor | None = None) -> torch.Tensor:
        """log(new / old), clamped to +-20 so that its exponential is finite; 0 where nothing is trained."""
        old = self.old_logprobs if old_logprobs is None else old_logprobs
        ratio = (self.new_logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.where(self.mask, ratio, torch.zeros_like(ratio))

    def sample_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` [R, T] over the trained tokens of every sample: [num_segments]. Samples are never split."""
        kept = torch.where(self.mask, values, torch.zeros_like(values)).reshape(-1)
        return values.new_zeros(max(self.num_segments, 1)).index_add(0, self._segment.reshape(-1), kept)

    def sample_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` [R, T] over the trained tokens of every sample: [num_segments]; 0 for none."""
        return self.sample_sum(values) / self.sample_sum(self.mask.to(values.dtype)).clamp(min=1)

    def to_tokens(self, per_sample: torch.Tensor) -> torch.Tensor:
        """Give every position the value of its sample: [R, T]. Padding, which is masked, gets that of sample 0."""
        return per_sample[self._segment]

    @property
    def _segment(self) -> torch.Tensor:
        return self.segment_ids.clamp(min=0)

    def token_mean(self, values: torch.Tensor) -> torch.Tensor:
        """A mean over the trained tokens of the step, as this micro-batch's share of the sum: a metric."""
        kept = torch.where(self.mask, values.detach().float(), 0.0)
        return kept.sum() / max(self.step_tokens, 1)


@dataclass(frozen=True)
class LossOutputs:
    """What a policy loss returns: the loss of every token [R, T] before weights, and metrics (`token_mean`)."""

    per_token: torch.Tensor
    metrics: Metrics = field(default_factory=dict)


#: A function of the type of its loss: `ppo` gets `PpoLoss`, one of the user `CustomLoss` with `loss_params`.
PolicyLoss = Callable[[LossInputs, Any], LossOutputs]
