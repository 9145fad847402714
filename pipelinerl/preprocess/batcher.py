"""Collects scored groups until they fill an optimizer step. A state machine without clock, I/O or threads.

Called by the loop: `add` for every group, `close_step` when the trainer may get another batch. Whole groups leave in
the order in which they came. What is dropped comes back as rejections, which the loop writes down first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipelinerl.config.schedule import Rounds
from pipelinerl.preprocess.filters import Rejection, reject_stale
from pipelinerl.records import ScoredSample


@dataclass(frozen=True)
class ReadyGroup:
    """Trainable samples of one group; `offset` is its place in the stream `actor`, `epochs_done` as in `Group`."""

    group_id: str
    offset: int
    samples: tuple[ScoredSample, ...]
    epochs_done: float = 0.0


@dataclass(frozen=True)
class ClosedStep:
    """The groups of one optimizer step, oldest first."""

    step: int
    groups: tuple[ReadyGroup, ...]

    @property
    def samples(self) -> list[ScoredSample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def epochs_done(self) -> float:
        return max(group.epochs_done for group in self.groups)


class Batcher:
    """Queue of groups.

    Args:
        samples_per_step: a step closes when it has at least so many samples.
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
        if samples_per_step < 1:
            raise ValueError(f"samples_per_step: got {samples_per_step}, expected at least 1")
        self._samples_per_step = samples_per_step
        # A queue smaller than one step could never fill it.
        self._capacity = None if capacity_samples is None else max(capacity_samples, samples_per_step)
        self._drop_oldest = drop_oldest
        self._max_version_lag = max_version_lag
        self._rounds = rounds
        self._step_samples = dict(step_samples or {})
        self._groups: deque[ReadyGroup] = deque()
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
        """Smallest stream offset of a group that is still here; None if the queue is empty."""
        return min((group.offset for group in self._groups), default=None)

    def add(self, group: ReadyGroup) -> list[Rejection]:
        """Queue a group; returns what had to be dropped for it."""
        if group.samples:
            self._groups.append(group)
            self._num_samples += len(group.samples)
        dropped: list[Rejection] = []
        while self._drop_oldest and self._capacity is not None and self._num_samples > self._capacity:
            if len(self._groups) == 1:
                break
            oldest = self._pop()
            dropped += [Rejection(item.sample, "stale", "dropped_oldest") for item in oldest.samples]
        return dropped

    def purge_stale(self, step: int) -> list[Rejection]:
        """Drop what would be too old in optimizer step `step`, which trains weights of version `step - 1`."""
        kept: deque[ReadyGroup] = deque()
        rejections: list[Rejection] = []
        for group in self._groups:
            fresh, old = reject_stale(group.samples, step - 1, self._max_version_lag)
            rejections += old
            if fresh:
                kept.append(group if not old else replace(group, samples=tuple(fresh)))
        self._groups = kept
        self._num_samples -= len(rejections)
        return rejections

    def close_step(self, step: int) -> ClosedStep | None:
        """Take whole groups for `step` if there are enough samples, else None. Call `purge_stale(step)` before."""
        if self._rounds is not None:
            return self._close_step_of_round(step, self._rounds)
        if self._num_samples < self._samples_per_step:
            return None
        taken: list[ReadyGroup] = []
        count = 0
        while count < self._samples_per_step:
            taken.append(self._pop())
            count += len(taken[-1].samples)
        return ClosedStep(step, tuple(taken))

    def close_rest(self, step: int, end_offset: int) -> ClosedStep | None:
        """Take for `step` what came before `end_offset`, up to a whole step. None: nothing of it is here."""
        taken: list[ReadyGroup] = []
        count = 0
        while self._groups and self._groups[0].offset < end_offset and count < self._samples_per_step:
            taken.append(self._pop())
            count += len(taken[-1].samples)
        self._step_samples[step] = count
        return ClosedStep(step, tuple(taken)) if taken else None

    def _close_step_of_round(self, step: int, rounds: Rounds) -> ClosedStep | None:
        """Share the groups of a complete round among its steps: evenly, whole groups, at least one for each step."""
        steps_left = rounds.steps_left(step - 1)
        if not steps_left:
            return None
        closed = sum(self._step_samples.get(before, 0) for before in range(rounds.start_of(step - 1) + 1, step))
        target = rounds.target_samples(step - 1)
        if closed + self._num_samples < target or len(self._groups) < steps_left:
            return None
        due = target - (steps_left - 1) * self._samples_per_step - closed
        taken = [self._pop()]
        count = len(taken[0].samples)
        while count < due and len(self._groups) >= steps_left:
            taken.append(self._pop())
            count += len(taken[-1].samples)
        self._step_samples = {step: count, **{s: n for s, n in self._step_samples.items() if step - s < rounds.steps}}
        return ClosedStep(step, tuple(taken))

    def _pop(self) -> ReadyGroup:
        group = self._groups.popleft()
        self._num_samples -= len(group.samples)
        return group
