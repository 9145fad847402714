"""Rules and advice of the algorithm (`finetune.rl`). Called through `rules.validate` and `rules.advice`."""

from __future__ import annotations

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

_GROUP_ESTIMATORS = ("rloo", "grpo", "dr_grpo", "reinforce_baseline")
_VALUE_HEAD = "causal-language-modeling-with-value-head"


def group_size(config: RunConfig) -> ConfigError | None:
    """A baseline from the group needs another rollout in it."""
    estimator = config.finetune.rl.advantage_estimator
    if estimator in _GROUP_ESTIMATORS and config.attempts < 2:
        return ConfigError(
            "attempts",
            config.attempts,
            f"at least 2 with finetune.rl.advantage_estimator={estimator}, which compares rollouts of one problem",
            "Set attempts=8, or finetune.rl.advantage_estimator=reinforce (REINFORCE++ with "
            "finetune.rl.normalize_reward=true).",
        )
    return None


def reference_servers(config: RunConfig) -> ConfigError | None:
    """Who asks for servers of the reference model needs a pool of them."""
    rl = config.finetune.rl
    if rl.reference == "servers" and rl.needs_reference and not config.has_reference_pool:
        return ConfigError(
            "finetune.rl.reference",
            "servers",
            "auto or local in a world without servers of the reference model",
            "Leave it at auto, or set world.preprocessor_fraction=1 (or world.num_preprocessor_llms=1).",
        )
    return None


def reference_temperature(config: RunConfig) -> ConfigError | None:
    """Servers of the reference model give log-probs at temperature 1 only."""
    temperature = config.sampling_temperature
    asks_servers = config.finetune.rl.needs_reference and not config.uses_local_reference(config.has_reference_pool)
    if temperature == 1 or not asks_servers:
        return None
    return ConfigError(
        "llm.parameters.temperature",
        temperature,
        "1.0 with log-probs of reference servers, which ignore the temperature",
        "Set it to 1.0, or finetune.rl.reference=local.",
    )


def value_head(config: RunConfig) -> ConfigError | None:
    """Generalised advantages need a value head that learns; a value loss has nothing to train without one."""
    rl, model_class = config.finetune.rl, config.finetune.model_class
    if model_class == _VALUE_HEAD:
        if rl.advantage_estimator == "gae" and rl.value_loss_coef == 0:
            return ConfigError(
                "finetune.rl.value_loss_coef",
                rl.value_loss_coef,
                "more than 0 with finetune.rl.advantage_estimator=gae: the value head begins at 0 and would stay there",
                "Start from finetune=ppo, or set it to 0.1.",
            )
        return None
    for key, value, used in (
        ("finetune.rl.advantage_estimator", rl.advantage_estimator, rl.advantage_estimator == "gae"),
        ("finetune.rl.value_loss_coef", rl.value_loss_coef, rl.value_loss_coef > 0),
    ):
        if used:
            return ConfigError(
                key, value, f"finetune.model_class={_VALUE_HEAD} with it", "Start from finetune=ppo, or set both."
            )
    return None


def value_loss(config: RunConfig) -> ConfigError | None:
    """Only generalised advantages have the returns that a value head learns. Without a head, `value_head` answers."""
    finetune = config.finetune
    estimator, coefficient = finetune.rl.advantage_estimator, finetune.rl.value_loss_coef
    if coefficient > 0 and estimator != "gae" and finetune.model_class == _VALUE_HEAD:
        return ConfigError(
            "finetune.rl.value_loss_coef",
            coefficient,
            f"0 with finetune.rl.advantage_estimator={estimator}, which uses no values",
            "Set finetune.rl.advantage_estimator=gae, or start from finetune=ppo.",
        )
    return None


def batch_normalisation(config: RunConfig) -> ConfigError | None:
    """Only advantages that are there before the first forward pass can be normalised over the step."""
    rl = config.finetune.rl
    asks = rl.normalize_reward or rl.advantage_estimator == "reinforce_baseline"
    if rl.normalize_reward and rl.advantage_estimator == "gae":
        return ConfigError(
            "finetune.rl.normalize_reward",
            True,
            "false with finetune.rl.advantage_estimator=gae, whose advantages are made token by token in the trainer",
            "Set it to false, or use advantage_estimator=reinforce or reinforce_baseline.",
        )
    if asks and not rl.use_advantages:
        return ConfigError(
            "finetune.rl.use_advantages",
            False,
            "true with finetune.rl.normalize_reward=true or advantage_estimator=reinforce_baseline: plain rewards are "
            "not normalised",
            "Use advantage_estimator=reinforce, which has no baseline either.",
        )
    return None


def constant_length(config: RunConfig) -> ConfigError | None:
    """A loss divided by a constant needs the constant."""
    rl = config.finetune.rl
    if rl.aggregation == "constant_length" and rl.constant_length_tokens is None:
        return ConfigError(
            "finetune.rl.constant_length_tokens",
            None,
            "a number of tokens with finetune.rl.aggregation=constant_length",
            f"Set it to llm.parameters.max_tokens, which is {config.llm.parameters.max_tokens}.",
        )
    return None


def group_options(config: RunConfig) -> ConfigError | None:
    """What looks at the spread of a group needs a baseline from it."""
    rl = config.finetune.rl
    if rl.advantage_estimator in _GROUP_ESTIMATORS:
        return None
    for key, is_set, reason in (
        ("divide_advantage_by_std", rl.divide_advantage_by_std, "a group of equal rewards has no spread to divide by"),
        ("filter_zero_advantage_groups", rl.filter_zero_advantage_groups, "its groups of reward 0 teach something"),
    ):
        if is_set:
            return ConfigError(
                f"finetune.rl.{key}",
                True,
                f"false with finetune.rl.advantage_estimator={rl.advantage_estimator}: {reason}",
                "Set it to false, or use an estimator with a baseline from the group, such as rloo.",
            )
    return None


def reward_range(config: RunConfig) -> ConfigError | None:
    """A range of mean rewards has room between its bounds, and looks at more than one rollout."""
    rl = config.finetune.rl
    low, high = rl.filter_reward_low, rl.filter_reward_high
    if low is not None and high is not None and low >= high:
        return ConfigError(
            "finetune.rl.filter_reward_low",
            low,
            f"less than finetune.rl.filter_reward_high={high}",
            "Exchange the two.",
        )
    if (low is not None or high is not None) and config.attempts < 2:
        return ConfigError(
            "attempts",
            config.attempts,
            "at least 2 with finetune.rl.filter_reward_low or filter_reward_high, which look at the mean of a group",
            "Set attempts=8, or both bounds to null.",
        )
    return None


def overlong_limit(config: RunConfig) -> ConfigError | None:
    """A length penalty needs the length at which it is full, and a buffer that lies below it."""
    rl, longest = config.finetune.rl, config.llm.parameters.max_tokens
    if rl.overlong_buffer_tokens and rl.overlong_limit_tokens is None:
        return ConfigError(
            "finetune.rl.overlong_limit_tokens",
            None,
            "a number of tokens with finetune.rl.overlong_buffer_tokens above 0",
            f"Set it to llm.parameters.max_tokens, which is {longest}, or to the sum over turns if there are several.",
        )
    if rl.overlong_limit_tokens is not None and rl.overlong_buffer_tokens > rl.overlong_limit_tokens:
        return ConfigError(
            "finetune.rl.overlong_buffer_tokens",
            rl.overlong_buffer_tokens,
            f"at most finetune.rl.overlong_limit_tokens={rl.overlong_limit_tokens}",
            "Lower it.",
        )
    return None


def entropy_target(config: RunConfig) -> ConfigError | None:
    """The bonus follows a line or a target, not both."""
    rl = config.finetune.rl
    if rl.target_entropy is not None and rl.final_entropy_bonus is not None:
        return ConfigError(
            "finetune.rl.final_entropy_bonus",
            rl.final_entropy_bonus,
            f"null with finetune.rl.target_entropy={rl.target_entropy}, which moves the bonus",
            "Remove one of the two.",
        )
    return None


def importance_bounds(config: RunConfig) -> ConfigError | None:
    """The lower bound of an interval lies below the upper one."""
    rl = config.finetune.rl
    if rl.importance_low >= rl.importance_high:
        return ConfigError(
            "finetune.rl.importance_low",
            rl.importance_low,
            f"less than finetune.rl.importance_high={rl.importance_high}",
            "Exchange the two.",
        )
    return None


def remarks(config: RunConfig) -> list[str]:
    """Return advice on settings of the algorithm that work but are probably not meant."""
    rl = config.finetune.rl
    if rl.kl_estimator == "k1" and (rl.kl_coef > 0 or (rl.final_kl_coef or 0.0) > 0):
        return [
            "finetune.rl.kl_estimator=k1 with finetune.rl.kl_coef: as a loss its expected gradient is 0 on-policy. "
            "Use k2 or k3, or finetune.rl.reward_minus_kl_coef"
        ]
    return []


RULES = (
    group_size,
    reference_servers,
    reference_temperature,
    value_head,
    value_loss,
    batch_normalisation,
    constant_length,
    group_options,
    reward_range,
    overlong_limit,
    entropy_target,
    importance_bounds,
)
