"""Which groups make the next batch, what it holds, when it may be written, which is the last. No clock, I/O or threads.

Whole groups leave in the order in which they came. Rejections are returned to the caller, which writes their fates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from msgspec.structs import replace

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.config.schedule import Rounds
from pipelinerl.errors import StreamError
from pipelinerl.preprocess.scoring import Rejection, reject_stale
from pipelinerl.records import (
    Group,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.rl.packing import make_plan
from pipelinerl.streams.base import Entry

# Groups with their offset in the stream `actor`; `record.samples` are the trainable ones.
Groups = list[Entry[Group]]

# One batch in training and one that is ready when it ends: more would only grow old in the stream.
MAX_STEPS_AHEAD = 2


class Batcher:
    """Queue of groups.

    Args:
        samples_per_step: a step closes when it has at least this many samples.
        capacity_samples: the queue never holds more if `drop_oldest`; None is unbounded.
        drop_oldest: what `add` does when the queue is full: drop from its old end (True), or nothing; then the caller
            stops reading while `is_full`.
        max_version_lag: `finetune.max_version_lag`.
        rounds: with rounds, a step closes only when the samples of its whole round are here.
        step_samples: samples by step of the batches that were closed before a restart.
    """

    def __init__(
        self,
        samples_per_step: int,
        capacity_samples: int | None = None,
        drop_oldest: bool = False,
        max_version_lag: int | None = None,
        rounds: Rounds | None = None,
        step_samples: Mapping[int, int] | None = None,
    ) -> None:
        self._samples_per_step = samples_per_step
        # A queue smaller than one step could never fill it.
        self._capacity = None if capacity_samples is None else max(capacity_samples, samples_per_step)
        self._drop_oldest = drop_oldest
        self._max_version_lag = max_version_lag
        self._rounds = rounds
        self._step_samples = dict(step_samples or {})
        self._groups: deque[Entry[Group]] = deque()
        self._num_samples = 0

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def num_batches(self) -> float:
        """Queue length in optimizer steps."""
        return self._num_samples / self._samples_per_step

    @property
    def is_full(self) -> bool:
        """True if the caller should stop adding (never with `drop_oldest`)."""
        return not self._drop_oldest and self._capacity is not None and self._num_samples >= self._capacity

    @property
    def oldest_offset(self) -> int | None:
        """Smallest stream offset of a group in the queue; None if it is empty."""
        return min((group.offset for group in self._groups), default=None)

    def add(self, group: Entry[Group]) -> list[Rejection]:
        """Queue a group; returns what had to be dropped for it."""
        if group.record.samples:
            self._groups.append(group)
            self._num_samples += len(group.record.samples)
        dropped: list[Rejection] = []
        while self._drop_oldest and self._capacity is not None and self._num_samples > self._capacity:
            if len(self._groups) == 1:
                break
            dropped += [Rejection(sample, "stale", "dropped_oldest") for sample in self._pop().record.samples]
        return dropped

    def purge_stale(self, step: int) -> list[Rejection]:
        """Drop what would be too old in optimizer step `step`, which trains weights of version `step - 1`."""
        kept: deque[Entry[Group]] = deque()
        rejections: list[Rejection] = []
        for group in self._groups:
            fresh, old = reject_stale(group.record.samples, step - 1, self._max_version_lag)
            rejections += old
            if fresh:
                kept.append(Entry(group.offset, replace(group.record, samples=fresh)) if old else group)
        self._groups = kept
        self._num_samples -= len(rejections)
        return rejections

    def close_step(self, step: int) -> Groups | None:
        """Take whole groups for `step` if there are enough samples, else None. Call `purge_stale(step)` before."""
        if self._rounds is not None:
            return self._close_step_of_round(step, self._rounds)
        if self._num_samples < self._samples_per_step:
            return None
        return self._take(self._samples_per_step)

    def close_rest(self, step: int, end_offset: int) -> Groups | None:
        """Take for `step` what came before `end_offset`, up to a whole step. None: nothing of it is here."""
        taken: Groups = []
        while self._groups and self._groups[0].offset < end_offset and num_samples(taken) < self._samples_per_step:
            taken.append(self._pop())
        self._step_samples[step] = num_samples(taken)
        return taken or None

    def _close_step_of_round(self, step: int, rounds: Rounds) -> Groups | None:
        """Share the groups of a complete round among its steps: evenly, whole groups, at least one for each step."""
        steps_left = rounds.steps_left(step - 1)
        if not steps_left:
            return None
        closed = sum(self._step_samples.get(before, 0) for before in range(rounds.start_of(step - 1) + 1, step))
        target = rounds.target_samples(step - 1)
        if closed + self._num_samples < target or len(self._groups) < steps_left:
            return None
        taken = self._take(target - (steps_left - 1) * self._samples_per_step - closed, keep_groups=steps_left - 1)
        recent = {s: count for s, count in self._step_samples.items() if step - s < rounds.steps}
        self._step_samples = {**recent, step: num_samples(taken)}
        return taken

    def _take(self, samples: int, keep_groups: int = 0) -> Groups:
        """Groups with at least `samples` samples, at least one, unless fewer than `keep_groups` would be left."""
        taken = [self._pop()]
        while num_samples(taken) < samples and len(self._groups) > keep_groups:
            taken.append(self._pop())
        return taken

    def _pop(self) -> Entry[Group]:
        group = self._groups.popleft()
        self._num_samples -= len(group.record.samples)
        return group


def num_samples(groups: Groups) -> int:
    return sum(len(group.record.samples) for group in groups)


def make_batch(
    step: int,
    groups: Groups,
    config: FinetuneConfig,
    num_ranks: int,
    actor_offset: int,
    epochs_done: float,
    incarnation: int,
    metrics: dict[str, float],
) -> TrainingBatch:
    """The batch of one optimizer step, planned for `num_ranks` ranks; `metrics` are of its scoring."""
    samples = [sample for group in groups for sample in group.record.samples]
    lengths = [len(sample.input_ids) for sample in samples]
    return TrainingBatch(
        id=f"{incarnation}-{step}",
        step=step,
        samples=samples,
        group_ids=[group.record.id for group in groups],
        plan=make_plan(lengths, num_ranks, config.seq_length, config.seq_packing, config.train_batch_size),
        actor_offset=actor_offset,
        epochs_done=epochs_done,
        incarnation=incarnation,
        metrics=metrics,
    )


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
