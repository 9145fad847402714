"""Where training stands: one small record that is saved with every checkpoint. No torch."""

from __future__ import annotations

import msgspec

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.records import TrainingBatch
from pipelinerl.rl.entropy_control import EntropyControl


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """State after optimizer step `step`; step 0 is the initial model.

    `data_offset` is the next record of stream `training_data`; `actor_offset` the offset in stream `actor` behind which
    no group was unsettled when the last trained batch was made; `epochs_done` are passes over the problems. Weights,
    optimizer and offsets are saved as one unit. `is_over`: the passes have nothing more to train; it is never saved.
    `entropy_control`: None before the first step, and without `finetune.rl.target_entropy`.
    """

    step: int = 0
    samples_processed: int = 0
    data_offset: int = 0
    actor_offset: int = 0
    epochs_done: float = 0.0
    is_over: bool = False
    incarnation: int = 0
    entropy_control: EntropyControl | None = None

    def after(
        self, batch: TrainingBatch, data_offset: int, entropy_control: EntropyControl | None = None
    ) -> TrainerState:
        """The state once `batch` was trained; `data_offset` is the offset behind its record."""
        return TrainerState(
            step=batch.step,
            samples_processed=self.samples_processed + len(batch.samples),
            data_offset=data_offset,
            actor_offset=batch.actor_offset,
            epochs_done=max(self.epochs_done, batch.epochs_done),
            incarnation=self.incarnation,
            entropy_control=entropy_control,
        )

    def is_complete(self, config: FinetuneConfig, update_interval: int) -> bool:
        """Whether training ends here: with the last step, or when the passes over the problems are done.

        The latter counts where weights are sent, every `update_interval` steps: a round of generate-then-train, and
        the turns that trainer and servers take, are not cut off in the middle.
        """
        if self.step >= config.last_step or self.is_over:
            return True
        epochs_done = config.max_epochs is not None and self.epochs_done >= config.max_epochs
        return epochs_done and self.step % update_interval == 0
