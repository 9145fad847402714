"""Section `finetune.rl`: policy losses, advantage estimators, corrections of the sampler's gap, and what they share.

One type per loss and estimator, with its own keys and defaults. The functions are in `rl/losses` and
`rl/advantages.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipelinerl.config.section import Choice, FlatSection, Section


class _Truncated(Section):
    clamp: float = Field(default=5.0, gt=0, description="upper bound of the importance weight")


class ReinforceLoss(_Truncated):
    """REINFORCE with truncated importance weights (arXiv 2509.19128)."""

    policy_loss: Literal["reinforce"] = Field(
        default="reinforce",
        description="policy loss: a name, or the dotted path of a function (docs/algorithms.md)",
    )


class _Clipped(Section):
    epsilon_low: float = Field(default=0.2, ge=0, lt=1, description="ratios are clipped below 1 - epsilon_low")
    epsilon_high: float = Field(default=0.2, ge=0, description="ratios are clipped above 1 + epsilon_high")


class PpoLoss(_Clipped):
    """Clipped ratios of tokens (arXiv 1707.06347)."""

    policy_loss: Literal["ppo"] = "ppo"
    dual_clip: float | None = Field(
        default=None, gt=1, description="bound of the loss for negative advantages; null: none"
    )


class GspoLoss(PpoLoss):
    """Clipped ratios of sequences (arXiv 2507.18071); they move little, so the bounds are narrow."""

    policy_loss: Literal["gspo"] = "gspo"  # type: ignore[assignment]
    epsilon_low: float = Field(default=3e-4, ge=0, lt=1, description="ratios are clipped below 1 - epsilon_low")
    epsilon_high: float = Field(default=4e-4, ge=0, description="ratios are clipped above 1 + epsilon_high")


class CispoLoss(_Clipped):
    """Clipped importance weights that carry no gradient (arXiv 2506.13585)."""

    policy_loss: Literal["cispo"] = "cispo"


class DecoupledPpoLoss(PpoLoss, _Truncated):
    """PPO with a proximal policy that is not the one that sampled (arXiv 2505.24298)."""

    policy_loss: Literal["decoupled_ppo"] = "decoupled_ppo"  # type: ignore[assignment]


class SapoLoss(Section):
    """A soft gate in place of clipping (arXiv 2511.20347)."""

    policy_loss: Literal["sapo"] = "sapo"
    soft_gate_positive: float = Field(default=1.0, gt=0, description="steepness of the gate for positive advantages")
    soft_gate_negative: float = Field(default=1.05, gt=0, description="steepness of the gate for negative advantages")


class CustomLoss(Section):
    """A function of the user's: `(LossInputs, CustomLoss) -> LossOutputs`."""

    policy_loss: str
    loss_params: dict[str, Any] = Field(default={}, description="settings of your own function, not checked")


PolicyLoss = Annotated[
    ReinforceLoss | PpoLoss | GspoLoss | CispoLoss | DecoupledPpoLoss | SapoLoss | CustomLoss,
    Choice("policy_loss", flat=True),
]


class _Normalized(Section):
    normalize_reward: bool = Field(default=False, description="normalize advantages over the tokens of a step")


class _Filtered(Section):
    filter_zero_advantage_groups: bool = Field(default=False, description="skip groups whose rewards are all equal")


class _Grouped(_Filtered):
    divide_advantage_by_std: bool = Field(default=False, description="divide by the group's standard deviation")


class RlooAdvantage(_Grouped, _Normalized):
    """Reward minus the mean of the other rollouts (arXiv 2402.14740)."""

    advantage_estimator: Literal["rloo"] = Field(
        default="rloo",
        description="advantage estimator: a name, or the dotted path of a function (docs/algorithms.md)",
    )


class GrpoAdvantage(_Grouped, _Normalized):
    """Reward minus the group's mean, divided by its standard deviation (arXiv 2402.03300)."""

    advantage_estimator: Literal["grpo"] = "grpo"
    divide_advantage_by_std: bool = Field(default=True, description="divide by the group's standard deviation")


class DrGrpoAdvantage(_Filtered, _Normalized):
    """Reward minus the group's mean (arXiv 2503.20783)."""

    advantage_estimator: Literal["dr_grpo"] = "dr_grpo"


class ReinforceAdvantage(_Normalized):
    """The reward itself. With `normalize_reward` this is REINFORCE++ (arXiv 2501.03262)."""

    advantage_estimator: Literal["reinforce"] = "reinforce"


class ReinforceBaselineAdvantage(_Grouped):
    """Reward minus the group's mean, normalized over the step (arXiv 2501.03262)."""

    advantage_estimator: Literal["reinforce_baseline"] = "reinforce_baseline"


class GaeAdvantage(Section):
    """Generalized advantages of a value head that is trained along with the policy (arXiv 1506.02438)."""

    advantage_estimator: Literal["gae"] = "gae"
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="lambda of generalized advantages")
    value_loss_coef: float = Field(default=0.1, gt=0, description="weight of the value loss")
    critic_learning_rate: float | None = Field(
        default=None, gt=0, description="peak learning rate of the value head; null: as the policy"
    )


class CustomAdvantage(_Filtered, _Normalized):
    """A function of the user's: `AdvantageInputs -> list[list[float]]`."""

    advantage_estimator: str


AdvantageEstimator = Annotated[
    RlooAdvantage
    | GrpoAdvantage
    | DrGrpoAdvantage
    | ReinforceAdvantage
    | ReinforceBaselineAdvantage
    | GaeAdvantage
    | CustomAdvantage,
    Choice("advantage_estimator", flat=True),
]

_LEVEL = "ratios of tokens or of sequences"
_LOW, _HIGH = "lower bound of the ratio", "upper bound of the ratio"


class NoCorrection(Section):
    """The loss's own ratio is all."""

    importance_correction: Literal["none"] = Field(
        default="none", description="correction for the gap between sampler and trainer (docs/algorithms.md)"
    )


class TruncateCorrection(Section):
    """Weights are cut at the upper bound."""

    importance_correction: Literal["truncate"] = "truncate"
    importance_level: Literal["token", "sequence"] = Field(default="token", description=_LEVEL)
    importance_high: float = Field(default=2.0, gt=0, description=_HIGH)


class MaskCorrection(TruncateCorrection):
    """Weights above the upper bound are 0."""

    importance_correction: Literal["mask"] = "mask"  # type: ignore[assignment]


class IcepopCorrection(TruncateCorrection):
    """Weights outside both bounds are 0 (arXiv 2510.18855)."""

    importance_correction: Literal["icepop"] = "icepop"  # type: ignore[assignment]
    importance_low: float = Field(default=0.5, ge=0, description=_LOW)


class GeometricMaskCorrection(Section):
    """Samples whose geometric mean ratio lies outside both bounds are dropped."""

    importance_correction: Literal["geometric_mask"] = "geometric_mask"
    importance_low: float = Field(default=0.5, ge=0, description=_LOW)
    importance_high: float = Field(default=2.0, gt=0, description=_HIGH)


ImportanceCorrection = Annotated[
    NoCorrection | TruncateCorrection | MaskCorrection | IcepopCorrection | GeometricMaskCorrection,
    Choice("importance_correction", flat=True),
]


class RLConfig(FlatSection):
    """The algorithm. Defaults follow arXiv 2509.19128: truncated importance weights with c = 5, leave-one-out
    baseline, no value network, no KL, no entropy bonus, no trust region."""

    loss: PolicyLoss = ReinforceLoss()
    advantage: AdvantageEstimator = RlooAdvantage()
    correction: ImportanceCorrection = NoCorrection()
    aggregation: Literal["sample", "sample_mean", "token", "group", "constant_length"] = Field(
        default="sample", description="denominator of the loss (docs/algorithms.md)"
    )
    constant_length_tokens: int | None = Field(
        default=None, ge=1, description="denominator of aggregation=constant_length"
    )
    relu_log_p_weights: bool = Field(default=False, description="treat negative advantages as 0")
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount per token (gae) or per turn (step rewards)")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of KL to the reference model in the loss")
    final_kl_coef: float | None = Field(
        default=None, ge=0, description="kl_coef at the end, reached linearly; null: constant"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of KL in the loss")
    reward_minus_kl_coef: float = Field(default=0.0, ge=0, description="weight of KL in the reward of each token")
    reference: Literal["auto", "servers", "local"] = Field(
        default="auto",
        description="where reference log-probs come from: servers, a frozen model next to the trainer (local), or "
        "servers if the world has them (auto)",
    )
    reference_offload: bool = Field(default=False, description="keep the local reference in host memory between steps")
    entropy_bonus: float = Field(default=0.0, ge=0, description="weight of the entropy in the loss")
    final_entropy_bonus: float | None = Field(
        default=None,
        ge=0,
        description="entropy_bonus at the end, reached linearly; null: constant",
    )
    target_entropy: float | None = Field(
        default=None,
        gt=0,
        description="entropy in nats per token: the bonus grows below it, and shrinks and is not paid above it; "
        "null: no target",
    )
    entropy_bonus_step: float = Field(
        default=0.005, gt=0, description="change of the bonus per step with target_entropy"
    )
    overlong_filtering: bool = Field(default=False, description="skip samples that were cut at the length limit")
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="number of output tokens before the limit that are penalized, in any task; 0: none"
    )
    overlong_limit_tokens: int | None = Field(
        default=None, ge=1, description="length limit for overlong_buffer_tokens, in output tokens of a sample"
    )
    overlong_penalty: float = Field(default=1.0, ge=0, description="penalty of an output at that limit")
    filter_reward_low: float | None = Field(default=None, description="skip groups with this mean reward or less")
    filter_reward_high: float | None = Field(default=None, description="skip groups with this mean reward or more")

    @property
    def policy_loss(self) -> str:
        return self.loss.policy_loss

    @property
    def advantage_estimator(self) -> str:
        return self.advantage.advantage_estimator

    @property
    def uses_values(self) -> bool:
        """Whether a value head is trained along with the policy."""
        return isinstance(self.advantage, GaeAdvantage)

    @property
    def uses_group(self) -> bool:
        """Whether a rollout's advantage depends on the other rollouts of its group."""
        return not isinstance(self.advantage, ReinforceAdvantage | GaeAdvantage | CustomAdvantage)

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by the standard deviation of the group's rewards."""
        return isinstance(self.advantage, _Grouped) and self.advantage.divide_advantage_by_std

    @property
    def filters_equal_groups(self) -> bool:
        """Whether groups whose rewards are all equal are left out."""
        return isinstance(self.advantage, _Filtered) and self.advantage.filter_zero_advantage_groups

    @property
    def normalizes_over_step(self) -> bool:
        """Whether advantages are normalized over the trained tokens of a step."""
        if isinstance(self.advantage, ReinforceBaselineAdvantage):
            return True
        return isinstance(self.advantage, _Normalized) and self.advantage.normalize_reward

    @property
    def weight_bound(self) -> float:
        """Upper bound of importance weights in the loss; in metrics of losses without one, 5."""
        return self.loss.clamp if isinstance(self.loss, _Truncated) else 5.0

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are part of the algorithm."""
        return self.kl_coef > 0 or (self.final_kl_coef or 0.0) > 0 or self.reward_minus_kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the exact entropy of the policy is part of the loss."""
        return self.entropy_bonus > 0 or bool(self.final_entropy_bonus) or self.target_entropy is not None
