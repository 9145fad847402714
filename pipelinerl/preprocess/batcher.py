"""From groups to batches: each group is scored once, untrainable samples are rejected with a reason, and the rest waits
in a queue for its step. `LastStep` says when no further batch is due. No clock, I/O, threads or torch.

Groups leave whole and in order. Rejections are returned to the caller, which writes their fates:

| fate     | reason                 | when                                                                        |
|----------|------------------------|-----------------------------------------------------------------------------|
| failed   | no_ref_logprobs        | the reference servers could not score it                                    |
| filtered | no_trained_tokens      | it has no tokens to train                                                   |
| filtered | longer_than_seq_length | more tokens than `finetune.seq_length`                                      |
| filtered | overlong               | truncated at the token limit, with `rl.overlong_filtering`                  |
| filtered | reward_range           | mean reward of its group outside `rl.filter_reward_low` .. `..._high`       |
| filtered | zero_advantage         | no sample of its group has one, with `rl.filter_zero_advantage_groups`      |
| stale    | rolled_back            | sampled by a version that no longer exists after a resume                   |
| stale    | max_version_lag        | a token would be older than `finetune.max_version_lag` when trained         |
| stale    | dropped_oldest         | training is slower than generation and the queue was full                   |
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.config.schedule import Rounds
from pipelinerl.records import IGNORED_LABEL, Fate, Group, RolloutSummary, Sample, TrainingBatch
from pipelinerl.rl.advantages import has_signal, score_group
from pipelinerl.rl.packing import plan_step
from pipelinerl.streams.base import Entry

# Groups with their offset in the stream `actor`; `record.samples` are the trainable ones.
Groups = list[Entry[Group]]
# Samples in, the same samples with ref_logprobs out (None: this one could not be scored).
ReferenceScorer = Callable[[Sequence[Sample]], list[Sample | None]]

_REPETITION_TOKENS = 32


@dataclass
class ResumePoint:
    """What an earlier start of the preprocessor has settled.

    Attributes:
        actor_offset: offset in `actor` to read from; `dispatched_groups` and `settled_samples` after it are done.
        epochs_done: passes over the problems at the last batch.
        first_steps: the first step of each incarnation's batches. A version from that step on, sampled by an older
            incarnation, was lost with its batch: the number now denotes another policy.
    """

    next_step: int = 1
    actor_offset: int = 0
    epochs_done: float = 0.0
    first_steps: dict[int, int] = field(default_factory=dict)
    dispatched_groups: set[str] = field(default_factory=set)
    settled_samples: set[str] = field(default_factory=set)
    step_samples: dict[int, int] = field(default_factory=dict)

    def is_rolled_back(self, sample: Sample) -> bool:
        """Whether `sample` holds a token of a version that no longer exists."""
        firsts = [step for incarnation, step in self.first_steps.items() if incarnation > sample.incarnation]
        return bool(firsts) and bool(sample.version_spans) and sample.max_version >= min(firsts)


@dataclass(frozen=True)
class Rejection:
    """One sample that will not be trained."""

    sample: Sample
    fate: Fate
    reason: str


def repeated_4grams(sample: Sample) -> float | None:
    """1 - distinct 4-grams / 4-grams of the sampled tokens (seq-rep-4 of arXiv 1908.04319); None below 32 tokens."""
    tokens = [label for label in sample.labels if label != IGNORED_LABEL]
    if len(tokens) < _REPETITION_TOKENS:
        return None
    distinct = len(set(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)))
    return 1.0 - distinct / (len(tokens) - 3)


class GroupScorer:
    """Scores and filters groups; a group that is read twice counts once.

    Args:
        add_reference: None: no reference log-probs are added here.
    """

    def __init__(
        self, config: FinetuneConfig, resume: ResumePoint, add_reference: ReferenceScorer | None = None
    ) -> None:
        self._config = config
        self._resume = resume
        self._add_reference = add_reference
        self._rollouts: list[RolloutSummary] = []
        self._repeated: list[float] = []

    def score(self, entries: Sequence[Entry[Group]]) -> list[tuple[Entry[Group], list[Rejection]]]:
        """New groups with their trainable samples, and what was rejected of each."""
        fresh = []
        for entry in entries:
            if entry.record.id not in self._resume.dispatched_groups:
                self._resume.dispatched_groups.add(entry.record.id)
                self._rollouts += entry.record.rollouts
                shares = map(repeated_4grams, entry.record.samples)
                self._repeated += [share for share in shares if share is not None]
                fresh.append(entry)
        found = self._reference_of([sample for entry in fresh for sample in entry.record.samples])
        return [self._score_one(entry, found) for entry in fresh]

    def take_statistics(self) -> dict[str, float]:
        """Means over the rollouts since the last call, rejected ones included; empty if there were none."""
        rollouts, count = self._rollouts, len(self._rollouts)
        if not count:
            return {}
        means = {
            #: mean reward of all rollouts since the last batch
            "preprocessor/reward_mean": sum(r.reward for r in rollouts) / count,
            "preprocessor/success_rate": sum(r.success for r in rollouts) / count,  #: share of successful ones
            #: share of those with a sample that was cut off, by the limit on tokens or by the context
            "preprocessor/cut_fraction": sum(r.num_cut > 0 for r in rollouts) / count,
        }
        if self._repeated:
            #: share of 4-grams of sampled tokens that occur in the same sample before (of 32 tokens and more)
            means["preprocessor/repeated_4grams"] = sum(self._repeated) / len(self._repeated)
        self._rollouts, self._repeated = [], []
        return means

    def _reference_of(self, samples: Sequence[Sample]) -> dict[str, Sample | None]:
        """Scored samples by id (None: not scored). Samples that cannot be trained are not sent to the servers."""
        if self._add_reference is None:
            return {}
        wanted = [s for s in samples if s.num_trained_tokens and len(s.input_ids) <= self._config.seq_length]
        found = self._add_reference(wanted) if wanted else []
        return {old.id: new for old, new in zip(wanted, found, strict=True)}

    def _score_one(
        self, entry: Entry[Group], reference: dict[str, Sample | None]
    ) -> tuple[Entry[Group], list[Rejection]]:
        group, rl = entry.record, self._config.rl
        with_reference = [(sample, reference.get(sample.id, sample)) for sample in group.samples]
        rejections = [Rejection(old, "failed", "no_ref_logprobs") for old, new in with_reference if new is None]
        empty = [rollout.reward for rollout in group.rollouts if rollout.num_samples == 0]
        scored = score_group([new for _, new in with_reference if new is not None], empty, rl)
        kept, untrainable = reject_untrainable(scored, self._config, [rollout.reward for rollout in group.rollouts])
        rejections += untrainable
        rejections += [Rejection(s, "stale", "rolled_back") for s in kept if self._resume.is_rolled_back(s)]
        settled = self._resume.settled_samples
        gone = settled | {rejection.sample.id for rejection in rejections}
        group = replace(group, samples=[sample for sample in kept if sample.id not in gone])
        return Entry(entry.offset, group), [r for r in rejections if r.sample.id not in settled]


def reject_untrainable(
    samples: Sequence[Sample], config: FinetuneConfig, rewards: Sequence[float] = ()
) -> tuple[list[Sample], list[Rejection]]:
    """Split off the samples of one group that the configuration does not train. Their rewards stay in the baseline.

    Args:
        samples: with the advantages of `score_group`.
        rewards: of all rollouts of the group, as the task gave them.
    """
    rl = config.rl
    without_signal = rl.filters_equal_groups and not any(has_signal(s.advantage or 0.0, rl) for s in samples)
    out_of_range = bool(rewards) and not _is_in_range(math.fsum(rewards) / len(rewards), rl)

    def reason(sample: Sample) -> str | None:
        if not sample.num_trained_tokens:
            return "no_trained_tokens"
        if len(sample.input_ids) > config.seq_length:
            return "longer_than_seq_length"
        if rl.overlong_filtering and not sample.finished:
            return "overlong"
        if out_of_range:
            return "reward_range"
        return "zero_advantage" if without_signal else None

    return _split(samples, "filtered", reason)


def _is_in_range(mean_reward: float, rl: RLConfig) -> bool:
    """low < mean < high: bounds that rewards reach (0 and 1) reject groups that are all wrong or all right."""
    low, high = rl.filter_reward_low, rl.filter_reward_high
    return (low is None or mean_reward > low) and (high is None or mean_reward < high)


def reject_stale(
    samples: Sequence[Sample], trained_at_version: int, max_version_lag: int | None
) -> tuple[list[Sample], list[Rejection]]:
    """Split off the samples that would be too old when the weights have version `trained_at_version`."""

    def reason(sample: Sample) -> str | None:
        if sample.max_version > trained_at_version:
            return "rolled_back"
        if max_version_lag is not None and trained_at_version - sample.min_version > max_version_lag:
            return "max_version_lag"
        return None

    return _split(samples, "stale", reason)


def _split(
    samples: Sequence[Sample], fate: Fate, reason_of: Callable[[Sample], str | None]
) -> tuple[list[Sample], list[Rejection]]:
    reasons = [(sample, reason_of(sample)) for sample in samples]
    kept = [sample for sample, reason in reasons if reason is None]
    return kept, [Rejection(sample, fate, reason) for sample, reason in reasons if reason is not None]


class Batcher:
    """Queue of groups.

    Args:
        samples_per_step: a step closes when it has at least this many samples.
        capacity_samples: the queue never holds more if `drop_oldest`; None is unbounded.
        drop_oldest: whether `add` drops the oldest groups when the queue is full; else the caller stops reading while
            `is_full`.
        rounds: with rounds, a step closes only when the samples of its whole round have arrived.
        step_samples: number of samples by step of the batches closed before a restart.
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
        """Drop samples that are too old for optimizer step `step`, which trains weights of version `step - 1`."""
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
        """Take whole groups for `step` if there are enough samples, else None. Call `purge_stale(step)` first."""
        if self._rounds is not None:
            return self._close_step_of_round(step, self._rounds)
        if self._num_samples < self._samples_per_step:
            return None
        return self._take(self._samples_per_step)

    def close_rest(self, step: int, end_offset: int) -> Groups | None:
        """Take groups from before `end_offset` for `step`, up to a whole step. None: there are none."""
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


class LastStep:
    """Whether the passes of `finetune.max_epochs` are over, so that no further batch is due.

    Training ends with the batch that has the last groups of the passes. To fill it the actor repeats problems, but many
    groups may be filtered, or all of them. So after one more pass the batch is closed with what is there; if nothing
    is, the trainer is told that no batch follows.

    Args:
        update_interval: steps between two weight updates; the trainer ends after a multiple of it.
        step: of the last batch that was closed; 0: none.
        epochs_done: the most that a batch says so far.
    """

    def __init__(self, max_epochs: int | None, update_interval: int, step: int, epochs_done: float) -> None:
        self._max_epochs = math.inf if max_epochs is None else max_epochs
        self._interval = update_interval
        self._step = step
        self._closed_epochs = epochs_done
        self._given_up = False
        # Passes done when they were first enough, or when the last batch after that was closed.
        self._over_since: float | None = None
        #: Set once one more pass has not filled the open batch: only groups before this offset are still trained.
        self.rest_end: int | None = None
        self.seen_epochs = 0.0
        self.see(epochs_done)

    def see(self, epochs_done: float) -> None:
        """Note the passes that a group reports as done, even if nothing of it is trained."""
        self.seen_epochs = max(self.seen_epochs, epochs_done)
        if self._over_since is None and self.seen_epochs >= self._max_epochs:
            self._over_since = self.seen_epochs

    def close(self, step: int, epochs_done: float) -> None:
        """Note a batch that was closed."""
        self._step = step
        self._closed_epochs = max(self._closed_epochs, epochs_done)
        if self._over_since is not None:
            self._over_since = max(self._over_since, epochs_done)

    @property
    def is_closed(self) -> bool:
        """Whether no further batch is due."""
        ends = self._closed_epochs >= self._max_epochs and self._step % self._interval == 0
        return ends or self._given_up

    def close_step(self, batcher: Batcher, step: int, end_offset: int) -> Groups | None:
        """The groups of batch `step`; for the last batch of the passes, what is there. None: no batch now, or ever.

        Args:
            end_offset: groups before it have arrived.
        """
        if self.rest_end is None and (groups := batcher.close_step(step)):
            return groups
        if not self.wait_no_longer(end_offset):
            return None
        rest = batcher.close_rest(step, self.rest_end or 0)
        self._given_up = rest is None
        return rest

    def wait_no_longer(self, end_offset: int) -> bool:
        """Whether one more pass did not fill the batch that would be the last; then `rest_end` is set."""
        if self._over_since is None:
            return False
        if self.rest_end is None and self.seen_epochs >= self._over_since + 1:
            self.rest_end = end_offset
        return self.rest_end is not None


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
    return TrainingBatch(
        id=f"{incarnation}-{step}",
        step=step,
        samples=samples,
        group_ids=[group.record.id for group in groups],
        plan=plan_step(samples, num_ranks, config),
        actor_offset=actor_offset,
        epochs_done=epochs_done,
        incarnation=incarnation,
        metrics=metrics,
    )
