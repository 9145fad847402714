"""Rules of the trainer and the algorithm. Called through `rules.validate`."""

from __future__ import annotations

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

_GROUP_ESTIMATORS = ("rloo", "grpo", "dr_grpo")
_VALUE_HEAD = "causal-language-modeling-with-value-head"


def group_size(config: RunConfig) -> ConfigError | None:
    """A baseline from the group needs another rollout in it."""
    estimator = config.finetune.rl.advantage_estimator
    if estimator in _GROUP_ESTIMATORS and config.attempts < 2:
        return ConfigError(
            "attempts",
            config.attempts,
            f"at least 2 with finetune.rl.advantage_estimator={estimator}, which compares rollouts of one problem",
            "Set attempts=8, or finetune.rl.advantage_estimator=reinforce.",
        )
    return None


def linked_keys(config: RunConfig) -> ConfigError | None:
    """`attempts` and `max_lag` have two names each."""
    for root, first, second in (
        ("attempts", config.attempts, config.finetune.attempts),
        ("max_lag", config.max_lag, config.finetune.max_lag),
    ):
        if first != second:
            return ConfigError(
                f"finetune.{root}", second, f"the value of {root}, which is {first!r}", f"Set {root} alone."
            )
    return None


def reference_servers(config: RunConfig) -> ConfigError | None:
    """KL in the reward is taken before the advantages, so servers must have scored the samples by then."""
    rl = config.finetune.rl
    if rl.reward_minus_kl_coef > 0 and (rl.reference == "local" or not config.has_reference_pool):
        return ConfigError(
            "finetune.rl.reward_minus_kl_coef",
            rl.reward_minus_kl_coef,
            "0, or servers of the reference model",
            "Set world.preprocessor_fraction=1 (or world.num_preprocessor_llms=1) and finetune.rl.reference=auto, or "
            "use finetune.rl.kl_coef, which needs none.",
        )
    if rl.reference == "servers" and (rl.kl_coef or rl.final_kl_coef) and not config.has_reference_pool:
        return ConfigError(
            "finetune.rl.reference",
            "servers",
            "auto or local in a world without servers of the reference model",
            "Leave it at auto, or set world.preprocessor_fraction=1 (or world.num_preprocessor_llms=1).",
        )
    return None


def value_head(config: RunConfig) -> ConfigError | None:
    """Generalised advantages need a value head; a value loss has nothing to train without one."""
    rl, model_class = config.finetune.rl, config.finetune.model_class
    if model_class == _VALUE_HEAD:
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
    if rl.advantage_estimator in (*_GROUP_ESTIMATORS, "reinforce_baseline"):
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


def unpacked_batch(config: RunConfig) -> ConfigError | None:
    """Without packing, the passes are shared evenly by the ranks."""
    finetune, ranks = config.finetune, config.world.num_finetune_ranks
    if not finetune.seq_packing and ranks and finetune.gradient_accumulation_passes % ranks:
        return ConfigError(
            "finetune.gradient_accumulation_passes",
            finetune.gradient_accumulation_passes,
            f"a multiple of world.num_finetune_ranks={ranks} with finetune.seq_packing=false",
            "Change one of them, or use finetune.seq_packing=true.",
        )
    return None


def seq_parallel(config: RunConfig) -> ConfigError | None:
    """One sequence is never split over ranks."""
    if config.finetune.seq_parallel > 1:
        return ConfigError(
            "finetune.seq_parallel",
            config.finetune.seq_parallel,
            "1: a sequence is not split over ranks",
            "For long sequences use finetune.gradient_checkpointing, a smaller finetune.logprob_chunk_tokens, or more "
            "ranks with deepspeed_config=deepspeed_stage3_bf16.",
        )
    return None


def quantised_base(config: RunConfig) -> ConfigError | None:
    """Quantised base weights would not be the weights that the servers sample from."""
    lora = config.finetune.lora
    for name, value in (("base_model_8bit", lora.base_model_8bit), ("base_model_4bit", lora.base_model_4bit)):
        if value:
            return ConfigError(
                f"finetune.lora.{name}",
                value,
                "false: the servers sample from unquantised weights, so a quantised base would train another policy",
                "Use bf16 weights with LoRA, or a DeepSpeed configuration with offload.",
            )
    return None


def generation_steps(config: RunConfig) -> ConfigError | None:
    """Only rounds of generate-then-train have steps per generation."""
    if config.steps_per_generation > 1 and config.schedule != "conventional":
        return ConfigError(
            "steps_per_generation",
            config.steps_per_generation,
            f"1 with schedule={config.schedule}",
            "Add schedule=conventional; the other schedules bound the lag with max_lag.",
        )
    return None


def round_updates(config: RunConfig) -> ConfigError | None:
    """Rounds of generate-then-train say themselves when weights are sent and how old samples get."""
    finetune, steps = config.finetune, config.steps_per_generation
    if config.schedule != "conventional":
        return None
    if finetune.weight_update_interval > 1:
        return ConfigError(
            "finetune.weight_update_interval",
            finetune.weight_update_interval,
            "1 with schedule=conventional, which sends weights after each round",
            f"Use steps_per_generation={finetune.weight_update_interval} instead.",
        )
    if finetune.max_version_lag is not None and finetune.max_version_lag < steps - 1:
        return ConfigError(
            "finetune.max_version_lag",
            finetune.max_version_lag,
            f"at least steps_per_generation - 1 = {steps - 1} with schedule=conventional",
            "Leave it out: the lag is bounded by steps_per_generation.",
        )
    return None


def one_backend(config: RunConfig) -> ConfigError | None:
    """DeepSpeed and FSDP both want to shard the model."""
    if config.use_deepspeed and config.use_fsdp:
        return ConfigError("use_fsdp", True, "false with use_deepspeed=true", "Choose one: add use_deepspeed=false.")
    return None


def tf32_products(config: RunConfig) -> ConfigError | None:
    """TF32 is a way to multiply fp32 values: where there are none, or a kernel takes none, it would do nothing."""
    finetune = config.finetune
    if finetune.dtype != "tf32":
        return None
    if config.use_fsdp and config.fsdp.param_dtype != "fp32":
        return ConfigError(
            "fsdp.param_dtype",
            config.fsdp.param_dtype,
            "fp32 with finetune.dtype=tf32, which multiplies fp32 weights",
            "Set fsdp.param_dtype=fp32, or finetune.dtype=bf16.",
        )
    if finetune.attn_implementation in ("flex_attention", "flash_attention_2"):
        return ConfigError(
            "finetune.attn_implementation",
            finetune.attn_implementation,
            "auto, sdpa or eager with finetune.dtype=tf32: this one is compiled, or for half precision",
            "Set finetune.attn_implementation=auto.",
        )
    return None


def interrupt_step(config: RunConfig) -> ConfigError | None:
    """An interruption comes before the end."""
    finetune = config.finetune
    if finetune.interrupt_train_steps == 0 or finetune.interrupt_train_steps > finetune.max_train_steps:
        return ConfigError(
            "finetune.interrupt_train_steps",
            finetune.interrupt_train_steps,
            f"-1 (off), or from 1 to finetune.max_train_steps={finetune.max_train_steps}",
            "Raise finetune.max_train_steps, or leave it at -1.",
        )
    return None


def steps_to_save(config: RunConfig) -> ConfigError | None:
    """Steps are counted from 1."""
    wrong = [step for step in config.finetune.also_save_steps if step < 1]
    if wrong:
        return ConfigError("finetune.also_save_steps", wrong, "steps from 1 on", "Remove them.")
    return None


def on_policy_updates(config: RunConfig) -> ConfigError | None:
    """With no lag allowed, each step needs the newest weights."""
    interval = config.finetune.weight_update_interval
    if interval > 1 and config.max_lag == 0:
        return ConfigError(
            "finetune.weight_update_interval",
            interval,
            "1 with max_lag=0, which trains only on the newest policy",
            "Raise max_lag, or update after every step.",
        )
    allowed = config.finetune.max_version_lag
    if allowed is not None and interval - 1 > allowed:
        return ConfigError(
            "finetune.max_version_lag",
            allowed,
            f"at least finetune.weight_update_interval - 1 = {interval - 1}; below, every sample would be stale",
            "Raise it, or update more often.",
        )
    return None


RULES = (
    group_size,
    linked_keys,
    reference_servers,
    value_head,
    constant_length,
    group_options,
    overlong_limit,
    importance_bounds,
    unpacked_batch,
    seq_parallel,
    quantised_base,
    generation_steps,
    round_updates,
    one_backend,
    tf32_products,
    interrupt_step,
    steps_to_save,
    on_policy_updates,
)
