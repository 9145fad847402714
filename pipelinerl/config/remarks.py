"""Remarks on settings that do nothing, or harm, as they are combined. Called through `rules.advice`.

Each remark is a small function from the configuration to lines for the user. What is left at its default is never
remarked on. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from pipelinerl.config.keys import default_of
from pipelinerl.config.rules_run import missing_task
from pipelinerl.config.rules_sampling import vllm_option
from pipelinerl.config.run import RunConfig

_VALUE_HEAD = "causal-language-modeling-with-value-head"
#: Keys of `finetune.rl` that some policy losses use, and those losses.
_LOSSES_OF = {
    "clamp": ("reinforce", "decoupled_ppo"),
    "epsilon_low": ("ppo", "gspo", "cispo", "decoupled_ppo"),
    "epsilon_high": ("ppo", "gspo", "cispo", "decoupled_ppo"),
    "dual_clip": ("ppo", "gspo", "decoupled_ppo"),
    "soft_gate_positive": ("sapo",),
    "soft_gate_negative": ("sapo",),
}
#: What evaluations measure beside the metrics of rollouts.
_OF_EVALUATIONS = ("success_rate", "mean_reward")
#: Values of vLLM's dtype. With `auto` it holds no weights in fp32 either.
_SIXTEEN_BITS = ("bfloat16", "float16", "half", "auto")


def remarks(config: RunConfig) -> list[str]:
    """Return one line for each setting that does nothing or harms, and one for a missing task."""
    return [line for remark in _REMARKS for line in remark(config)]


def _task(config: RunConfig) -> list[str]:
    fault = missing_task(config)
    return [] if fault is None else [f"this cannot be started as it is: {fault}"]


def _evaluations(config: RunConfig) -> list[str]:
    every, steps = config.eval_every_n_versions, config.finetune.max_train_steps
    if every < steps or every == default_of("eval_every_n_versions"):
        return []
    return [
        f"eval_every_n_versions={every} is not below finetune.max_train_steps={steps}: evaluations are only before and "
        "after training. Versions are optimizer steps, not samples: set for instance eval_every_n_versions=50"
    ]


def _best_model(config: RunConfig) -> list[str]:
    """A name that looks like another one: what rollouts report is not known yet, and without it no model is kept."""
    name = config.finetune.keep_best
    near = get_close_matches(name, _OF_EVALUATIONS, n=1) if name is not None and name not in _OF_EVALUATIONS else []
    return [
        f"finetune.keep_best={name} keeps no model unless your rollouts report a metric of that name; is {other} meant?"
        for other in near
    ]


def _other_losses(config: RunConfig) -> list[str]:
    """Keys of a policy loss that is not the chosen one."""
    chosen = config.finetune.rl.policy_loss
    return [
        f"finetune.rl.{key} does nothing with finetune.rl.policy_loss={chosen}; it belongs to {', '.join(losses)}"
        for key, losses in _LOSSES_OF.items()
        if chosen not in losses and _is_changed(config.finetune.rl, f"finetune.rl.{key}")
    ]


def _values(config: RunConfig) -> list[str]:
    """Settings of the value head and of generalised advantages."""
    finetune, lines = config.finetune, []
    estimator = finetune.rl.advantage_estimator
    has_head, uses_values = finetune.model_class == _VALUE_HEAD, estimator == "gae"
    if has_head and not uses_values:
        lines.append(
            "finetune.model_class: the value head is not trained or used with finetune.rl.advantage_estimator="
            f"{estimator}, only with gae"
        )
    if not has_head and _is_changed(finetune, "finetune.critic_learning_rate"):
        lines.append(f"finetune.critic_learning_rate does nothing without finetune.model_class={_VALUE_HEAD}")
    if not uses_values and _is_changed(finetune.rl, "finetune.rl.gae_lambda"):
        lines.append(
            f"finetune.rl.gae_lambda does nothing with finetune.rl.advantage_estimator={estimator}; it belongs to gae"
        )
    return lines


def _importance(config: RunConfig) -> list[str]:
    rl = config.finetune.rl
    if rl.importance_correction != "none":
        return []
    return [
        f"finetune.rl.{key} does nothing with finetune.rl.importance_correction=none"
        for key in ("importance_level", "importance_low", "importance_high")
        if _is_changed(rl, f"finetune.rl.{key}")
    ]


def _entropy_target(config: RunConfig) -> list[str]:
    rl = config.finetune.rl
    if rl.target_entropy is not None or not _is_changed(rl, "finetune.rl.entropy_bonus_step"):
        return []
    return ["finetune.rl.entropy_bonus_step does nothing without finetune.rl.target_entropy"]


def _environments(config: RunConfig) -> list[str]:
    servers, target = config.world.env_replicas, (config.environment or {}).get("_target_")
    if target and not servers:
        return [f"environment: no server of {target} is started with world.env_replicas=0; set world.env_replicas=1"]
    if servers and config.environment is None:
        return [f"world.env_replicas={servers} starts nothing: no environment is set; set environment._target_"]
    return []


def _other_weights(config: RunConfig) -> list[str]:
    """A trainer with fp32 values that cannot compute with the weights that servers in 16 bits have."""
    finetune = config.finetune
    products = "fp32" if finetune.dtype == "auto" and not finetune.load_as_bf16 else finetune.dtype
    server = str(vllm_option(config, "dtype")[1]).lower()
    if products not in ("fp32", "tf32") or server not in _SIXTEEN_BITS:
        return []
    if finetune.lora.enabled and finetune.lora.sync == "merged":
        reason, remedy = "only servers round merged weights", "Watch rl/logprob_abs_diff_on_policy"
    elif config.use_deepspeed:
        reason = "DeepSpeed computes with fp32 weights as they are"
        remedy = "Set finetune.dtype=bf16, or use_deepspeed=false (plain, or FSDP2 with use_fsdp=true)"
    else:
        return []
    return [
        f"finetune.dtype={products} beside servers with dtype {server}: trainer and servers follow policies that "
        f"differ by rounding, further with every step ({reason}). {remedy}"
    ]


def _is_changed(section: Any, key: str) -> bool:
    return bool(getattr(section, key.rpartition(".")[2]) != default_of(key))


_REMARKS: tuple[Callable[[RunConfig], list[str]], ...] = (
    _task,
    _evaluations,
    _best_model,
    _other_losses,
    _values,
    _importance,
    _entropy_target,
    _environments,
    _other_weights,
)
