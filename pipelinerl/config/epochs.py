"""`finetune.max_epochs`: passes over the problems after which training ends. How many steps that takes; notes on it."""

from __future__ import annotations

from pipelinerl.config.keys import default_of
from pipelinerl.config.run import RunConfig

KEY = "finetune.max_epochs"


def steps_of_epochs(num_problems: int, attempts: int, max_epochs: int, samples_per_step: int) -> int:
    """Return the optimizer steps of `max_epochs` passes where every rollout has one sample and all are trained."""
    return -(-num_problems * attempts * max_epochs // samples_per_step)


def epoch_notes(config: RunConfig, num_problems: int) -> list[str]:
    """Return remarks on settings that do not fit the number of steps that the passes will take."""
    finetune, epochs = config.finetune, config.finetune.max_epochs
    if epochs is None:
        return []
    steps = steps_of_epochs(num_problems, config.attempts, epochs, finetune.samples_per_step)
    if steps > finetune.max_train_steps:
        return [
            f"finetune.max_train_steps={finetune.max_train_steps} ends the run before {KEY}={epochs}, which takes "
            f"{steps} steps with one sample a rollout"
        ]
    notes = []
    if config.max_lag is None and config.schedule != "conventional" and config.pop_old_data:
        notes.append(
            f"{KEY}={epochs} with max_lag=null: samples that are dropped because training is slower than sampling have "
            "had their turn. Set max_lag to train on all problems"
        )
    # Those that are not below max_train_steps have a note already.
    if finetune.lr_scheduler_type != "constant" and steps <= finetune.num_warmup_steps < finetune.max_train_steps:
        notes.append(
            f"finetune.num_warmup_steps={finetune.num_warmup_steps} is not below the {steps} steps that {KEY}={epochs} "
            "takes with one sample a rollout: the learning rate is still rising at the end"
        )
    every = config.eval_every_n_versions
    if steps <= every < finetune.max_train_steps and every != default_of("eval_every_n_versions"):
        notes.append(
            f"eval_every_n_versions={every} is not below the {steps} steps that {KEY}={epochs} takes with one sample a "
            "rollout: evaluations are only before and after training"
        )
    return notes
