"""The loss of one micro-batch: policy loss by name, importance correction, KL, entropy bonus, value loss.

**Policy losses** are in `rl/losses/`. A new one, `NAME`, is a type in `config/algorithm.py` with its keys, and a file
`NAME.py` there with a function `NAME(LossInputs, that type) -> LossOutputs`; docs/algorithms.md has a line for it. A
loss of your own has the same signature, gets a `CustomLoss` with your `loss_params`, and is named by its dotted path:
`finetune.rl.policy_loss=my_package.my_module.my_loss`.

**Importance correction** for the gap between sampler and trainer, with any policy loss. With rho = pi / mu (no
gradient) per token, or per sample with `importance_level: sequence` (the product over its trained tokens), the loss of
each token is multiplied by

    truncate        min(rho, importance_high)                                     TIS
    mask            rho where rho <= importance_high, else 0                      MIS
    icepop          rho where importance_low <= rho <= importance_high, else 0    arXiv 2510.18855
    geometric_mask  1 where the geometric mean of rho over the sample lies in the range, else 0

The first three are the whole importance weight. The loss's own ratio must not count it again, so it becomes pi /
stop_gradient(pi), which is 1 with the right gradient. (Every batch is trained in exactly one optimizer step, so the
policy before the step is the policy in training, and no second forward pass is needed.) `geometric_mask` only drops
samples; the loss keeps its ratio to the sampler.

**KL(policy || reference)** is estimated per token (J. Schulman, "Approximating KL Divergence", 2020). With
r = log ref - log new of a token that the policy sampled:

    k1 = -r             unbiased, can be negative; as a loss its expected gradient is zero: use it in the reward
    k2 = r^2 / 2        biased, low variance; as a loss its gradient is that of KL on-policy
    k3 = e^r - r - 1    unbiased, never negative, low variance

**Coefficients** of the KL term and the entropy bonus move linearly over training if a final value is set. With
`finetune.rl.target_entropy` the bonus instead keeps the entropy from staying below a target, as in arXiv 2505.22312,
with the entropy of the previous step instead of an extra pass over the batch:

    bonus(k + 1) = c(k + 1) if e(k) <= target else 0
    c(k + 1)     = max(0, c(k) + d) if e(k) < target, max(0, c(k) - d) if e(k) > target, else c(k)

e(k): entropy per trained token at step k, nats. d: `finetune.rl.entropy_bonus_step`. c(1): `finetune.rl.entropy_bonus`.

**Value head** (`advantage_estimator: gae`). The group stage gives each sample its reward as its "advantage"; here it
becomes the reward of the last trained token, on top of `token_rewards` (KL in the reward). GAE over the values of the
head (no gradient) gives every token its advantage and its return.

    value loss_t = (V_t - return_t)^2 / 2
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

import msgspec
import torch

from pipelinerl.config.algorithm import (
    GaeAdvantage,
    GeometricMaskCorrection,
    IcepopCorrection,
    MaskCorrection,
    NoCorrection,
    RLConfig,
    TruncateCorrection,
)
from pipelinerl.config.algorithm import PolicyLoss as LossConfig
from pipelinerl.config.section import DOTTED, Choice, Section
from pipelinerl.rl.advantages import gae
from pipelinerl.rl.microbatch import MicroBatch, positions_of
from pipelinerl.rl.user_function import LOSS_API_VERSION, load_function

#: entropy of the policy per trained token over the whole vocabulary, nats (only with an entropy bonus or target)
ENTROPY = "rl/entropy"
# A diagnostic that is absent if no token was trained, when the metrics of the loss are 0.
_TRAINED = "rl/entropy_estimate"
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

    All token tensors are [R, T] and line up with the predicted tokens. `of` replaces untrained positions by zeros, so
    masked tokens have exactly zero gradient even if the model's output there is not finite.

    Attributes:
        new_logprobs: log-probs of the targets under the policy in training. Only this, `entropy` and `values` have
            gradients.
        old_logprobs: under the policy that sampled the token.
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
        """Spread the value of each sample to its positions: [R, T]. Padding (masked) gets that of sample 0."""
        return per_sample[self._segment]

    @property
    def _segment(self) -> torch.Tensor:
        return self.segment_ids.clamp(min=0)

    def token_mean(self, values: torch.Tensor) -> torch.Tensor:
        """This micro-batch's share of a mean over the trained tokens of the step: a metric."""
        kept = torch.where(self.mask, values.detach().float(), 0.0)
        return kept.sum() / max(self.step_tokens, 1)


@dataclass(frozen=True)
class LossOutputs:
    """Output of a policy loss: the unweighted loss of every token [R, T], and metrics (`token_mean`)."""

    per_token: torch.Tensor
    metrics: Metrics = field(default_factory=dict)


#: Called with the type of its loss: `ppo` gets `PpoLoss`, a user function `CustomLoss` with `loss_params`.
PolicyLoss = Callable[[LossInputs, Any], LossOutputs]

#: One type in `config/algorithm.py` and one module of `rl/losses/` with a function of the same name.
POLICY_LOSSES = sorted(Choice("policy_loss").members(get_args(LossConfig)[0]).keys() - {DOTTED})


def policy_loss_function(name: str) -> PolicyLoss:
    """The policy loss `name`, or the user's function at that dotted path (ConfigError: there is none)."""
    if name in POLICY_LOSSES:
        found: PolicyLoss = getattr(importlib.import_module(f"pipelinerl.rl.losses.{name}"), name)
        return found
    return load_function("finetune.rl.policy_loss", name, LossInputs.api_version)


@dataclass(frozen=True)
class Coefficients:
    """Factors of the KL term and of the entropy bonus at one step."""

    kl: float
    entropy: float


def coefficients_at(config: RLConfig, step: int, max_steps: float) -> Coefficients:
    """KL and entropy coefficient of optimizer step `step` (from 1) without a target entropy."""
    return Coefficients(
        kl=_linear(config.kl_coef, config.final_kl_coef, step, max_steps),
        entropy=_linear(config.entropy_bonus, config.final_entropy_bonus, step, max_steps),
    )


def _linear(start: float, final: float | None, step: int, max_steps: float) -> float:
    """`start` at step 1, `final` at `max_steps` and later, a straight line between; constant if `final` is None."""
    if final is None:
        return start
    if max_steps <= 1:
        return final
    share = min((step - 1) / (max_steps - 1), 1.0)
    return start + (final - start) * share


class EntropyControl(msgspec.Struct, frozen=True, kw_only=True):
    """State of the target entropy, saved in checkpoints. `entropy` is that of the previous step, if any."""

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
    assert config.target_entropy is not None  # `at` makes no control without one
    return config.target_entropy


def compute_loss(inputs: LossInputs, config: RLConfig, coefficients: Coefficients) -> tuple[torch.Tensor, Metrics]:
    """This micro-batch's share of the step's loss (0-d) and metrics: sums over micro-batches and ranks.

    Raises:
        ConfigError: there is no such loss of the user.
        ValueError: the inputs lack values that a coefficient needs.
    """
    returns = None
    if isinstance(config.advantage, GaeAdvantage):
        inputs, returns = _with_gae_advantages(inputs, config)
    loss, metrics = _policy_term(inputs, config)
    for term, found in (
        _kl_term(inputs, config, coefficients.kl),
        _entropy_term(inputs, coefficients.entropy),
        _value_term(inputs, returns, config.advantage),
    ):
        metrics |= found
        if term is not None:
            loss = loss + term
    metrics["finetune/loss"] = loss.detach()  #: the whole loss of the step: policy, KL, entropy and value terms
    return loss, metrics


_Term = tuple[torch.Tensor | None, Metrics]
_Correction = NoCorrection | TruncateCorrection | GeometricMaskCorrection


def _policy_term(inputs: LossInputs, config: RLConfig) -> tuple[torch.Tensor, Metrics]:
    corrected, factor, metrics = _correct(inputs, config.correction)
    policy = policy_loss_function(config.policy_loss)(corrected, config.loss)
    per_token = policy.per_token if factor is None else policy.per_token * factor
    loss = weighted_sum(inputs, per_token)
    metrics = {**metrics, **policy.metrics}
    metrics["rl/policy_loss"] = loss.detach()  #: the policy term alone
    return loss, metrics


def _correct(inputs: LossInputs, config: _Correction) -> tuple[LossInputs, torch.Tensor | None, Metrics]:
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


def _kl_term(inputs: LossInputs, config: RLConfig, coefficient: float) -> _Term:
    if inputs.ref_logprobs is None:
        if coefficient and inputs.num_segments:
            raise ValueError(
                f"finetune.rl.kl_coef: got {coefficient} without reference log-probs, expected a reference model. "
                "Set finetune.rl.reference to auto, or set kl_coef to 0"
            )
        return None, {}
    kl = token_kl(inputs.new_logprobs, inputs.ref_logprobs, config.kl_estimator)
    metrics = {"rl/kl_reference": inputs.token_mean(kl)}  #: KL to the reference model per token (with a reference)
    return coefficient * weighted_sum(inputs, kl) if coefficient else None, metrics


def _entropy_term(inputs: LossInputs, coefficient: float) -> _Term:
    if inputs.entropy is None:
        if coefficient:
            raise ValueError("finetune.rl.entropy_bonus is not 0, but the forward pass computed no entropy")
        return None, {}
    bonus = -coefficient * weighted_sum(inputs, inputs.entropy) if coefficient else None
    return bonus, {ENTROPY: inputs.token_mean(inputs.entropy)}


def _with_gae_advantages(inputs: LossInputs, config: RLConfig) -> tuple[LossInputs, torch.Tensor]:
    """Inputs with per-token advantages, and the return of every token [R, T].

    Raises:
        ValueError: there are no values.
    """
    if inputs.values is None or not isinstance(config.advantage, GaeAdvantage):
        raise ValueError(
            f"finetune.rl.advantage_estimator: got {config.advantage_estimator!r} without values, expected gae and a "
            "model with a value head"
        )
    values = inputs.values.detach().double().cpu()
    rewards, mask, segments = inputs.advantages.double().cpu(), inputs.mask.cpu(), inputs.segment_ids.cpu()
    earned = torch.zeros_like(values) if inputs.token_rewards is None else inputs.token_rewards.double().cpu()
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for segment in range(inputs.num_segments):
        place = mask & (segments == segment)
        count = int(place.sum())
        if count:
            steps = earned[place].tolist()
            steps[-1] += rewards[place][-1].item()
            found, targets = gae(steps, values[place].tolist(), config.gamma, config.advantage.gae_lambda)
            advantages[place] = torch.tensor(found, dtype=torch.float64)
            returns[place] = torch.tensor(targets, dtype=torch.float64)
    if config.relu_log_p_weights:
        advantages.clamp_(min=0.0)
    like = inputs.advantages
    return replace(inputs, advantages=advantages.to(like)), returns.to(inputs.values)


def _value_term(inputs: LossInputs, returns: torch.Tensor | None, estimator: Section) -> _Term:
    if returns is None or inputs.values is None or not isinstance(estimator, GaeAdvantage):
        return None, {}
    per_token = (inputs.values - returns).square() / 2
    metrics = {
        "rl/value_loss": inputs.token_mean(per_token),  #: value head: half the squared error per token
        "rl/value_mean": inputs.token_mean(inputs.values),  #: value head: mean value
    }
    return estimator.value_loss_coef * weighted_sum(inputs, per_token), metrics


def weighted_sum(inputs: LossInputs, per_token: torch.Tensor) -> torch.Tensor:
    """Sum over trained tokens of weight * value; masked values (finite or not) add exactly 0."""
    return (torch.where(inputs.mask, per_token, torch.zeros_like(per_token)) * inputs.weights).sum()


def token_kl(new: torch.Tensor, ref: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """KL estimate of every token. Log-ratios are clamped to [-5, 5] (no gradient beyond), so e^r is finite."""
    r = (ref - new).clamp(-5.0, 5.0)
    if estimator == "k1":
        return -r
    if estimator == "k2":
        return r.square() / 2
    # k3. Near the reference e^r and 1 cancel: their difference in fp32 would be rounding, and often negative.
    return torch.expm1(r) - r
