"""Rollouts without a trainer (`debug.mode=actor`): what is published is settled at once, and enough is enough.

Used by the actor's loop in place of what the trainer would say. Waits for the servers to come up; nothing else.
"""

from __future__ import annotations

import asyncio
import logging

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.passes import Passes
from pipelinerl.actor.trainer_state import TrainerState
from pipelinerl.config import RunConfig
from pipelinerl.errors import WeightSyncError, WorkerError
from pipelinerl.weights.link import ControlClient, control_session

logger = logging.getLogger(__name__)


class AloneTrainer:
    """Ends the run when as many samples are published as `finetune.max_train_steps` steps would train, or the passes
    of `finetune.max_epochs` are done.

    Args:
        config: of the run.
        budget: samples are settled in it.
        trainer: told that the servers have version 0, and that training is done.
        passes: over the problems.
    """

    def __init__(self, config: RunConfig, budget: SampleBudget, trainer: TrainerState, passes: Passes) -> None:
        self._budget = budget
        self._trainer = trainer
        self._passes = passes
        self._max_epochs = config.finetune.max_epochs
        self.wanted_samples = config.finetune.last_step * config.finetune.samples_per_step
        self.samples = 0

    async def wait_for_servers(self, urls: list[str], token: str, timeout_s: float) -> None:
        """Return when all servers are up: they sample with the model that they loaded, which is version 0.

        Raises:
            WorkerError: one of them did not come up in time.
        """
        async with control_session(token) as session:
            try:
                await asyncio.gather(*(ControlClient(session, url, url).wait_healthy(timeout_s) for url in urls))
            except WeightSyncError as error:
                raise WorkerError(f"the servers {', '.join(urls)} did not all come up in {timeout_s:g} s") from error
        self._trainer.serve(0)

    def published(self, group_id: str, num_samples: int) -> None:
        """A group is in the stream."""
        self.samples += num_samples
        self._budget.settle_group(group_id)
        if self.samples >= self.wanted_samples:
            logger.info("%d samples are published, as many as training would take", self.samples)
            self._trainer.finish()
        elif self._max_epochs is not None and self._passes.epochs_done >= self._max_epochs:
            logger.info("%g passes over the problems are done", self._max_epochs)
            self._trainer.finish()
