"""What the actor knows about training: policy version, finished steps, whether it is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from pipelinerl.actor.budget import SampleBudget
from pipelinerl.config import RunConfig
from pipelinerl.records import (
    FateRecord,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingDone,
    WeightUpdateSuccess,
)

logger = logging.getLogger(__name__)


class Changes:
    """Lets coroutines of one event loop wait until something holds."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Make all waiters check again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], bool], retry_s: Callable[[], float | None] = lambda: None) -> None:
        """Return once `predicate` holds; it is checked now, after every `notify`, and after `retry_s()` seconds."""
        while True:
            # Before the check, so that a change by time alone is either seen by it or still to come.
            seconds = retry_s()
            if predicate():
                return
            with contextlib.suppress(TimeoutError):
                # Zero would spin.
                async with asyncio.timeout(seconds or None):
                    await self._changed.wait()


class TrainingProgress:
    """The state of training in this incarnation, from the streams `trainer` and `fates`.

    Args:
        incarnation: updates of other incarnations say nothing about the current servers.
    """

    def __init__(self, budget: SampleBudget, incarnation: int, changes: Changes, last_step: float = math.inf) -> None:
        self.budget = budget
        self.changes = changes
        self._incarnation = incarnation
        self._last_step = last_step
        self.version: int | None = None
        self.steps_done = 0
        self.done = False

    @property
    def current_version(self) -> int:
        """The version that the servers sample with; 0 before the first update."""
        return self.version or 0

    @property
    def needs_groups(self) -> bool:
        """False once the last step is done, even if its weights have not arrived."""
        return not self.done and self.steps_done < self._last_step

    def apply_message(self, message: TrainerMessage) -> None:
        """Apply one message of the trainer."""
        is_own = message.incarnation == self._incarnation
        match message:
            case WeightUpdateSuccess() if is_own:
                self.version = message.version
            case TrainerStarted() if is_own:
                self.steps_done = message.step
            case StepDone():
                if is_own:
                    self.steps_done = message.step
                for group_id in message.group_ids:
                    self.budget.settle_group(group_id)
            case TrainingDone() if is_own:
                self.version = message.version
                self.done = True
        self.budget.policy.observe(message, self.budget, is_own)
        self.changes.notify()

    def apply_fate(self, fate: FateRecord) -> None:
        """Apply one fate that the preprocessor decided."""
        self.budget.settle_samples(fate.group_id, fate.sample_ids)
        self.changes.notify()

    def published(self, group_id: str, num_samples: int, epochs_done: float) -> None:
        """Note that a group is in the stream; messages of the trainer settle it."""


class ProgressWithoutTrainer(TrainingProgress):
    """Without a trainer (`debug.mode`), published samples are settled at once.

    Done once the samples of `finetune.max_train_steps` steps are published or `finetune.max_epochs` passes are over.
    """

    def __init__(self, config: RunConfig, budget: SampleBudget, incarnation: int, changes: Changes) -> None:
        super().__init__(budget, incarnation, changes)
        self._max_epochs = config.finetune.max_epochs
        self._wanted_samples = config.finetune.last_step * config.finetune.samples_per_step
        self._samples = 0

    def serve_initial_weights(self) -> None:
        """Note that the servers have the weights that they started with: version 0."""
        self.version = 0
        self.changes.notify()

    def published(self, group_id: str, num_samples: int, epochs_done: float) -> None:
        self._samples += num_samples
        self.budget.settle_group(group_id)
        if self._samples >= self._wanted_samples:
            logger.info("done: %d samples are published, as many as training would use", self._samples)
            self.done = True
        elif self._max_epochs is not None and epochs_done >= self._max_epochs:
            logger.info("done: %g passes over the problems are complete", self._max_epochs)
            self.done = True
        self.changes.notify()
