"""Rules that compare keys with each other, and advice. Called by the composition after the types are right.

Each rule is a small function from the configuration to its one `ConfigError`, or None. They live by topic in
`rules_algorithm`, `rules_training`, `rules_sampling`, `rules_world` and `rules_run`. What needs the machine (GPUs,
ports) belongs to the world plan.
"""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.config import rules_adapter, rules_algorithm, rules_run, rules_sampling, rules_training, rules_world
from pipelinerl.config.agent import unused_agent_keys
from pipelinerl.config.messages import raise_faults
from pipelinerl.config.remarks import remarks as remarks_of
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

Rule = Callable[[RunConfig], ConfigError | None]
RULES: tuple[Rule, ...] = (
    *rules_algorithm.RULES,
    *rules_training.RULES,
    *rules_adapter.RULES,
    *rules_sampling.RULES,
    *rules_world.RULES,
    *rules_run.RULES,
)


def validate(config: RunConfig) -> None:
    """Check every rule.

    Raises:
        ConfigError: with one line for each broken rule.
    """
    raise_faults([fault for fault in (rule(config) for rule in RULES) if fault is not None])


def advice(config: RunConfig) -> list[str]:
    """Return remarks on settings that work but are probably not meant."""
    remarks = rules_algorithm.remarks(config)
    finetune = config.finetune
    if finetune.lr_scheduler_type != "constant" and finetune.num_warmup_steps >= finetune.max_train_steps:
        remarks.append(
            f"finetune.num_warmup_steps={finetune.num_warmup_steps} is not below "
            f"finetune.max_train_steps={finetune.max_train_steps}: the learning rate is still rising at the end"
        )
    slots = rules_sampling.vllm_number(config, "max-num-seqs")
    if slots is not None and slots < config.actor.llm_max_rollouts:
        remarks.append(
            f"actor.llm_max_rollouts={config.actor.llm_max_rollouts} is above the servers' max-num-seqs={slots}: "
            "the rest waits inside the server"
        )
    if config.schedule == "conventional" and config.max_lag is not None:
        remarks.append(
            f"max_lag={config.max_lag} is not used with schedule=conventional: the lag is at most "
            f"steps_per_generation - 1 = {config.steps_per_generation - 1} versions"
        )
    remarks += unused_agent_keys(config)
    remarks += remarks_of(config)
    return remarks
