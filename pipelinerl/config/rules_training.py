"""Rules of the trainer. Called through `rules.validate`."""

from __future__ import annotations

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError


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


def best_needs_evaluations(config: RunConfig) -> ConfigError | None:
    """The best model is chosen by what evaluations measure."""
    keep_best = config.finetune.keep_best
    if keep_best is not None and not config.test_dataset_names:
        return ConfigError(
            "finetune.keep_best",
            keep_best,
            "null without held-out problems, as nothing is evaluated",
            "Name some in test_dataset_names, or leave it out.",
        )
    return None


RULES = (
    generation_steps,
    round_updates,
    one_backend,
    tf32_products,
    interrupt_step,
    steps_to_save,
    on_policy_updates,
    best_needs_evaluations,
)
