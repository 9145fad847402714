"""`finetune.max_epochs`: passes over the problems after which training ends. How many steps that takes; notes on it.

`settle_epochs` is called by the composition, before validation; `epoch_notes` by the launcher, when the problems are
counted. Pure.
"""

from __future__ import annotations

from typing import Any

from pipelinerl.config.keys import default_of
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

KEY, AGENT_KEY = "finetune.max_epochs", "agent.max_epochs"


def settle_epochs(data: dict[str, Any]) -> None:
    """With an agent function, `agent.max_epochs` sets `finetune.max_epochs`, in place.

    Raises:
        ConfigError: both are set, to different values.
    """
    actor, agent, finetune = data.get("actor"), data.get("agent"), data.get("finetune")
    if not (isinstance(actor, dict) and isinstance(agent, dict) and isinstance(finetune, dict)):
        return
    epochs = agent.get("max_epochs")
    # What is no number of passes is refused under its own name.
    is_number = isinstance(epochs, int) and not isinstance(epochs, bool) and epochs > 0
    if not isinstance(actor.get("agent_func_path"), str) or not is_number:
        return
    if finetune.get("max_epochs") not in (None, epochs):
        raise ConfigError(
            KEY,
            finetune["max_epochs"],
            f"the value of {AGENT_KEY}, which is {epochs}",
            f"They are one setting: set {AGENT_KEY} alone.",
        )
    finetune["max_epochs"] = epochs


def steps_of_epochs(num_problems: int, attempts: int, max_epochs: int, samples_per_step: int) -> int:
    """Return the optimizer steps of `max_epochs` passes where every rollout has one sample and all are trained."""
    return -(-num_problems * attempts * max_epochs // samples_per_step)


def epoch_notes(config: RunConfig, num_problems: int) -> list[str]:
    """Return remarks on settings that do not fit the number of steps that the passes will take."""
    finetune, epochs = config.finetune, config.finetune.max_epochs
    if epochs is None:
        return []
    key = AGENT_KEY if config.actor.agent_func_path is not None and config.agent.max_epochs == epochs else KEY
    steps = steps_of_epochs(num_problems, config.attempts, epochs, finetune.samples_per_step)
    if steps > finetune.max_train_steps:
        return [
            f"finetune.max_train_steps={finetune.max_train_steps} ends the run before {key}={epochs}, which takes "
            f"{steps} steps with one sample a rollout"
        ]
    notes = []
    if config.max_lag is None and config.schedule != "conventional" and config.pop_old_data:
        notes.append(
            f"{key}={epochs} with max_lag=null: samples that are dropped because training is slower than sampling have "
            "had their turn. Set max_lag to train on all problems"
        )
    # Those that are not below max_train_steps have a note already.
    if finetune.lr_scheduler_type != "constant" and steps <= finetune.num_warmup_steps < finetune.max_train_steps:
        notes.append(
            f"finetune.num_warmup_steps={finetune.num_warmup_steps} is not below the {steps} steps that {key}={epochs} "
            "takes with one sample a rollout: the learning rate is still rising at the end"
        )
    every = config.eval_every_n_versions
    if steps <= every < finetune.max_train_steps and every != default_of("eval_every_n_versions"):
        notes.append(
            f"eval_every_n_versions={every} is not below the {steps} steps that {key}={epochs} takes with one sample a "
            "rollout: evaluations are only before and after training"
        )
    return notes
