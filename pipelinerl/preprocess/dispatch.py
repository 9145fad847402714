"""How far the preprocessor may run ahead of the trainer. State without I/O.

`TrainerView.take` is called by the feed of the stream `trainer` (its thread); the loop reads the state. Only messages
of this incarnation count: after a resume the trainer starts again from its checkpoint and says so.
"""

from __future__ import annotations

import threading

from pipelinerl.errors import StreamError
from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted, TrainingDone, WeightUpdateSuccess

# One batch in training and one that is ready when it ends: more would only grow old in the stream.
MAX_STEPS_AHEAD = 2


class TrainerView:
    """What the trainer said last. Thread-safe.

    Args:
        incarnation: of this start of the run.
        first_step: step that this process will dispatch first. In the first incarnation the trainer stands right before
            it; later ones have to hear from the trainer where it went back to.
        bounded: False if there is no trainer (a run of actor and preprocessor alone): never hold back.
    """

    def __init__(self, incarnation: int, first_step: int, bounded: bool = True) -> None:
        self._incarnation = incarnation
        self._first_step = first_step
        self._bounded = bounded
        self._lock = threading.Lock()
        self._steps_done = first_step - 1 if incarnation == 0 else first_step - 1 - MAX_STEPS_AHEAD
        self._is_done = False
        self._changes = 0

    def take(self, message: TrainerMessage) -> None:
        """Digest one message.

        Raises:
            StreamError: the trainer has a training state behind steps whose batches are not in the stream any more.
        """
        if message.incarnation != self._incarnation:
            return
        if isinstance(message, TrainerStarted) and message.step >= self._first_step:
            last = self._first_step - 1
            raise StreamError(
                f"the trainer goes on from step {message.step}, but the stream training_data ends with the batch of "
                f"step {last}: the machine lost records (see streams.fsync). Move the folders of "
                f"finetune/training_state behind {last} away to go on from an earlier one"
            )
        with self._lock:
            self._changes += 1
            if isinstance(message, StepDone | TrainerStarted):
                self._steps_done = message.step
            elif isinstance(message, WeightUpdateSuccess):
                # Version v is the result of step v; after a resume it is the first thing that the trainer says.
                self._steps_done = message.version
            elif isinstance(message, TrainingDone):
                self._is_done = True

    @property
    def steps_done(self) -> int:
        with self._lock:
            return self._steps_done

    @property
    def is_done(self) -> bool:
        """True once training is complete."""
        with self._lock:
            return self._is_done

    @property
    def changes(self) -> int:
        """Grows with every message that counts."""
        with self._lock:
            return self._changes

    def may_dispatch(self, step: int) -> bool:
        """True if batch `step` may be written now."""
        with self._lock:
            return not self._bounded or step - self._steps_done <= MAX_STEPS_AHEAD
