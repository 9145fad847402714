"""When the preprocessor may write the next batch, and when no further batch is due. No I/O."""

from __future__ import annotations

from pipelinerl.errors import StreamError
from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted, TrainingDone, WeightUpdateSuccess

# One batch in training and one that is ready when it ends: more would only grow old in the stream.
MAX_STEPS_AHEAD = 2


class TrainerView:
    """What the trainer said last. One thread calls `take`; any thread may read.

    Only messages of this incarnation count: after a resume the trainer starts from its checkpoint and says so.

    Args:
        incarnation: of this start of the run.
        first_step: step that this process will dispatch first. In the first incarnation the trainer is right before it;
            later ones have to hear from the trainer where it went back to.
        bounded: False if there is no trainer (a run of actor and preprocessor alone): never hold back.
    """

    def __init__(self, incarnation: int, first_step: int, bounded: bool = True) -> None:
        self._incarnation = incarnation
        self._first_step = first_step
        self._bounded = bounded
        self.steps_done = first_step - 1 if incarnation == 0 else first_step - 1 - MAX_STEPS_AHEAD
        self.is_done = False
        #: Grows with every message that counts.
        self.changes = 0

    def take(self, message: TrainerMessage) -> None:
        """Digest one message.

        Raises:
            StreamError: the trainer's checkpoint is newer than the last batch in the stream.
        """
        if message.incarnation != self._incarnation:
            return
        if isinstance(message, TrainerStarted) and message.step >= self._first_step:
            last = self._first_step - 1
            raise StreamError(
                f"the trainer resumes after step {message.step}, but the stream training_data ends with the batch of "
                f"step {last}: the machine lost records (see streams.fsync). To resume from an earlier checkpoint, "
                f"move the folders of finetune/training_state after {last} away"
            )
        if isinstance(message, StepDone | TrainerStarted):
            self.steps_done = message.step
        elif isinstance(message, WeightUpdateSuccess):
            # Version v is the result of step v; after a resume it is the first thing that the trainer says.
            self.steps_done = message.version
        elif isinstance(message, TrainingDone):
            self.is_done = True
        self.changes += 1

    def may_dispatch(self, step: int) -> bool:
        """True if batch `step` may be written now."""
        return not self._bounded or step - self.steps_done <= MAX_STEPS_AHEAD


class LastStep:
    """Whether the passes of `finetune.max_epochs` are over, so that no further batch is due.

    Training ends with the batch that has the last groups of the passes. To fill that batch the actor repeats problems,
    but many groups may be filtered, in the end all of them. So after one more pass the batch is closed with what is
    there, and if nothing is there, the trainer is told that no batch follows.

    Args:
        max_epochs: `finetune.max_epochs`; None: never ends.
        update_interval: steps between two weight updates; the trainer ends after a multiple of it.
        step: of the last batch that was closed; 0: none.
        epochs_done: the most that a batch says so far.
    """

    def __init__(self, max_epochs: int | None, update_interval: int, step: int, epochs_done: float) -> None:
        self.max_epochs = max_epochs
        self._interval = update_interval
        self._step = step
        self._closed_epochs = epochs_done
        self._given_up = False
        # Passes that were done when they were first enough, or when the last batch after that was closed.
        self._over_since: float | None = None
        #: Set once one more pass has not filled the open batch: only groups before this offset are still trained.
        self.rest_end: int | None = None
        self.seen_epochs = 0.0
        self.see(epochs_done)

    def see(self, epochs_done: float) -> None:
        """Note the passes that a group says are done, also a group of which nothing is trained."""
        self.seen_epochs = max(self.seen_epochs, epochs_done)
        if self._over_since is None and self.max_epochs is not None and self.seen_epochs >= self.max_epochs:
            self._over_since = self.seen_epochs

    def close(self, step: int, epochs_done: float) -> None:
        """Note a batch that was closed."""
        self._step = step
        self._closed_epochs = max(self._closed_epochs, epochs_done)
        if self._over_since is not None:
            self._over_since = max(self._over_since, epochs_done)

    def give_up(self) -> None:
        """There is nothing for another batch."""
        self._given_up = True

    @property
    def is_closed(self) -> bool:
        """Whether no further batch is due."""
        if self.max_epochs is None:
            return False
        ends = self._closed_epochs >= self.max_epochs and self._step % self._interval == 0
        return ends or self._given_up

    def wait_no_longer(self, end_offset: int) -> bool:
        """Whether one more pass did not fill the batch that would be the last; then `rest_end` is set.

        Args:
            end_offset: groups before it came in.
        """
        if self._over_since is None:
            return False
        if self.rest_end is None and self.seen_epochs >= self._over_since + 1:
            self.rest_end = end_offset
        return self.rest_end is not None
