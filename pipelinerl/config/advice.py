"""Remarks on settings that work but are probably not meant."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from pipelinerl.config.agent import unused_agent_keys
from pipelinerl.config.keys import default_of
from pipelinerl.config.run import RunConfig
from pipelinerl.config.validate import missing_task

#: Evaluations measure these in addition to the metrics of rollouts.
_OF_EVALUATIONS = ("success_rate", "mean_reward")
#: Values of vLLM's dtype. With `auto` it holds no weights in fp32 either.
_SIXTEEN_BITS = ("bfloat16", "float16", "half", "auto")


def advice(config: RunConfig) -> list[str]:
    """Remarks on settings that work but are probably not meant."""
    return [line for remark in _REMARKS for line in remark(config)]


def _remark_task(config: RunConfig) -> Iterator[str]:
    if (fault := missing_task(config)) is not None:
        yield f"this cannot be started as it is: {fault}"


def _remark_training(config: RunConfig) -> Iterator[str]:
    rl, finetune = config.finetune.rl, config.finetune
    warmup, steps = finetune.num_warmup_steps, finetune.max_train_steps
    if rl.kl_estimator == "k1" and (rl.kl_coef > 0 or (rl.final_kl_coef or 0.0) > 0):
        yield (
            "finetune.rl.kl_estimator=k1 with finetune.rl.kl_coef: as a loss its expected gradient is 0 on-policy. "
            "Use k2 or k3, or finetune.rl.reward_minus_kl_coef"
        )
    if finetune.lr_scheduler_type != "constant" and warmup >= steps:
        yield f"finetune.num_warmup_steps={warmup} is not below finetune.max_train_steps={steps}"
    if rl.target_entropy is None and rl.entropy_bonus_step != default_of("finetune.rl.entropy_bonus_step"):
        yield "finetune.rl.entropy_bonus_step does nothing without finetune.rl.target_entropy"


def _remark_servers(config: RunConfig) -> Iterator[str]:
    slots, rollouts = config.vllm_config.number("max-num-seqs"), config.actor.llm_max_rollouts
    if slots is not None and slots < rollouts:
        yield f"actor.llm_max_rollouts={rollouts} is above the servers' max-num-seqs={slots}: the rest waits there"
    servers, target = config.world.env_replicas, (config.environment or {}).get("_target_")
    if target and not servers:
        yield f"environment: no server of {target} is started with world.env_replicas=0; set world.env_replicas=1"
    if servers and config.environment is None:
        yield f"world.env_replicas={servers} starts nothing: no environment is set; set environment._target_"


def _remark_evaluations(config: RunConfig) -> Iterator[str]:
    every, steps = config.eval_every_n_versions, config.finetune.max_train_steps
    if every >= steps and every != default_of("eval_every_n_versions"):
        yield (
            f"eval_every_n_versions={every} is not below finetune.max_train_steps={steps}: evaluations are only before "
            "and after training. Versions are optimizer steps, not samples"
        )
    # What rollouts report is not known yet, but a name like a built-in one is probably a typo.
    name = config.finetune.keep_best
    if name is not None and name not in _OF_EVALUATIONS:
        for near in get_close_matches(name, _OF_EVALUATIONS, n=1):
            yield f"finetune.keep_best={name} works only if your rollouts report that metric; is {near} meant?"


def _remark_precision(config: RunConfig) -> Iterator[str]:
    """A trainer with fp32 values that cannot compute with the weights that servers in 16 bits have."""
    products, lora = config.finetune.dtype, config.finetune.lora
    server = str(config.vllm_config.option("dtype")[1]).lower()
    if products not in ("fp32", "tf32") or server not in _SIXTEEN_BITS:
        return
    if lora.enabled and lora.sync == "merged":
        reason, remedy = "only servers round merged weights", "Watch rl/logprob_abs_diff_on_policy"
    elif config.backend.type == "deepspeed":
        reason = "DeepSpeed computes with fp32 weights as they are"
        remedy = "Set finetune.dtype=bf16, or backend=plain or fsdp"
    else:
        return
    yield (
        f"finetune.dtype={products} with servers in {server}: trainer and servers follow policies that differ by "
        f"rounding, more with every step ({reason}). {remedy}"
    )


_REMARKS = (
    *(_remark_task, _remark_training, _remark_servers, _remark_evaluations, _remark_precision),
    unused_agent_keys,
)


def steps_of_epochs(num_problems: int, attempts: int, max_epochs: int, samples_per_step: int) -> int:
    """Optimizer steps of `max_epochs` passes where every rollout has one sample and all are trained."""
    return -(-num_problems * attempts * max_epochs // samples_per_step)


def epoch_notes(config: RunConfig, num_problems: int) -> list[str]:
    """Remarks on settings that do not fit the number of steps that `finetune.max_epochs` will take."""
    finetune, epochs = config.finetune, config.finetune.max_epochs
    if epochs is None or not num_problems:
        return []
    most = finetune.max_train_steps
    steps = steps_of_epochs(num_problems, config.attempts, epochs, finetune.samples_per_step)
    takes = f"the {steps} steps that finetune.max_epochs={epochs} takes with one sample per rollout"
    if steps > most:
        return [f"finetune.max_train_steps={most} is below {takes}"]
    notes = []
    if config.max_lag is None and config.pop_old_data:
        notes.append("max_lag=null: dropped samples count as used. Set max_lag to train on all problems")
    # Those that are not below max_train_steps have a note already.
    warmup, every = finetune.num_warmup_steps, config.eval_every_n_versions
    if finetune.lr_scheduler_type != "constant" and steps <= warmup < most:
        notes.append(f"finetune.num_warmup_steps={warmup} is not below {takes}")
    if steps <= every < most and every != default_of("eval_every_n_versions"):
        notes.append(f"eval_every_n_versions={every} is not below {takes}")
    return notes
