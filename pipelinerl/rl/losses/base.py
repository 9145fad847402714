"""What a loss gets and what it returns. A new loss is one file next to this one, one entry in the registry, one test.

All token tensors are [R, T], line up with `MicroBatch.targets`, and may hold anything where `mask` is False:
`LossInputs` replaces masked values by zeros before a loss sees them, so masked tokens give exactly zero gradient even
if the model's output there is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pipelinerl.config.finetune import RLConfig
from pipelinerl.rl.metrics import TensorMetric
from pipelinerl.rl.microbatch import MicroBatch, positions_of

# exp(20) = 4.9e8: far beyond any clip range, and its square is finite in fp32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch after the forward pass.

    Attributes:
        new_logprobs: log-probs of the targets under the policy in training; the only tensors with gradient are this,
            `entropy` and `values`.
        old_logprobs: under the policy that sampled them.
        advantages, mask, weights, segment_ids: see `MicroBatch`.
        versions: policy version that sampled the token; `trainer_version` is that of the weights in training.
        num_segments: samples in the micro-batch; `step_tokens`: trained tokens of the whole step.
        ref_logprobs: of the frozen reference model, needed if the KL coefficient is not 0.
        entropy: nats per token, needed if the entropy coefficient is not 0.
        values: output of the value head before each target, needed for `gae`.
        trained: see `MicroBatch`; None: looked for in `mask` when it is needed.
        oldest_versions: see `MicroBatch`; None: those of the tokens themselves.
        token_rewards: see `MicroBatch`; used by `gae`.
    """

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
        ref_logprobs: torch.Tensor | None = None,
        trainer_version: int = 0,
    ) -> LossInputs:
        """Join a micro-batch with the model's outputs; `ref_logprobs` overrides those of the batch."""

        def kept(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else torch.where(batch.mask, values, torch.zeros_like(values))

        new = kept(new_logprobs)
        assert new is not None
        return cls(
            new_logprobs=new,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            weights=batch.weights,
            segment_ids=batch.segment_ids,
            versions=batch.versions,
            num_segments=batch.num_segments,
            step_tokens=batch.step_tokens,
            trainer_version=trainer_version,
            ref_logprobs=kept(batch.ref_logprobs if ref_logprobs is None else ref_logprobs),
            entropy=kept(entropy),
            values=kept(values),
            trained=batch.trained,
            oldest_versions=batch.oldest_versions,
            token_rewards=batch.token_rewards,
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

    def token_mean(self, values: torch.Tensor) -> TensorMetric:
        """A mean over the trained tokens of the step, as this micro-batch's share of the sum."""
        kept = torch.where(self.mask, values.detach().float(), 0.0)
        return TensorMetric(kept.sum() / max(self.step_tokens, 1), "sum")


@dataclass(frozen=True)
class LossOutputs:
    """`loss` is this micro-batch's share of the step's loss: add up over micro-batches and ranks, divide by nothing."""

    loss: torch.Tensor
    metrics: dict[str, TensorMetric] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoss:
    """What a policy loss returns: the loss of every token [R, T] before weights, and its metrics."""

    per_token: torch.Tensor
    metrics: dict[str, TensorMetric] = field(default_factory=dict)


PolicyLoss = Callable[[LossInputs, RLConfig], TokenLoss]
