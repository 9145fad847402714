"""AdamW, its parameter groups and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pipelinerl.config.algorithm import GaeAdvantage
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.policy import VALUE_HEAD

ScheduleName = Literal["cosine", "linear", "constant", "constant_with_warmup"]


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor of every optimizer step; resuming needs nothing but the step and its batch.

    With `max_epochs` the number of steps is not known in advance (rollouts have any number of samples, and some are
    filtered): it is estimated from the passes done so far.
    """

    name: ScheduleName
    warmup_steps: int
    total_steps: int
    max_epochs: int | None = None

    def total_at(self, step: int, epochs_done: float = 0.0) -> float:
        """Steps of the whole training, as estimated at step `step` (from 1) with `epochs_done` of its batch."""
        if self.max_epochs is None or epochs_done <= 0:
            return self.total_steps
        return min(self.total_steps, max(step, step * self.max_epochs / epochs_done))

    def factor(self, step: int, epochs_done: float = 0.0) -> float:
        """Factor of optimizer step `step` (from 1).

        Warm-up rises from 1 / warmup_steps to 1. After it, with s steps done since and n in total: linear 1 - s / n,
        cosine (1 + cos(pi * s / n)) / 2, so that the last step still learns.
        """
        done = step - 1
        if self.name != "constant" and done < self.warmup_steps:
            return (done + 1) / self.warmup_steps
        if self.name in ("constant", "constant_with_warmup"):
            return 1.0
        remaining = max(self.total_at(step, epochs_done) - self.warmup_steps, 1)
        share = min((done - self.warmup_steps) / remaining, 1.0)
        return 1.0 - share if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


def schedule_of(config: FinetuneConfig) -> Schedule:
    return Schedule(config.lr_scheduler_type, config.num_warmup_steps, config.max_train_steps, config.max_epochs)


def parameter_groups(named: Iterable[tuple[str, torch.nn.Parameter]], config: FinetuneConfig) -> list[dict[str, Any]]:
    """Trainable parameters in groups: decayed matrices, undecayed vectors (norms, biases), and the value head with its
    own learning rate. `base_lr` keeps each group's rate before the schedule."""
    estimator = config.rl.advantage
    critic_lr = estimator.critic_learning_rate if isinstance(estimator, GaeAdvantage) else None
    groups = {
        "matrices": {"params": [], "base_lr": config.learning_rate, "weight_decay": config.weight_decay},
        "vectors": {"params": [], "base_lr": config.learning_rate, "weight_decay": 0.0},
        "critic": {"params": [], "base_lr": critic_lr or config.learning_rate, "weight_decay": 0.0},
    }
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        # DeepSpeed keeps the shape next to a parameter that it has sharded.
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1
        kind = "critic" if VALUE_HEAD in name.split(".") else "matrices" if is_matrix else "vectors"
        groups[kind]["params"].append(parameter)  # type: ignore[attr-defined]
    return [{**group, "lr": group["base_lr"]} for group in groups.values() if group["params"]]


def make_adamw(
    named: Iterable[tuple[str, torch.nn.Parameter]], config: FinetuneConfig, fused: bool | None = None
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) with the configured betas over `parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(named, config),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=fused,
    )
