"""One group from the stream -> trainable samples and rejections. Called by the loop for every group.

Waits for nothing, but for the reference servers if the algorithm needs reference log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.preprocess.batcher import ReadyGroup
from pipelinerl.preprocess.filters import Rejection, fits, reject_faulty, reject_untrainable
from pipelinerl.preprocess.recovery import ResumePoint
from pipelinerl.preprocess.scoring import score_group
from pipelinerl.records import Group, Sample
from pipelinerl.streams.base import Entry

# Samples in, the same samples with ref_logprobs out (None: this one could not be scored).
ReferenceScorer = Callable[[Sequence[Sample]], list[Sample | None]]


@dataclass
class RolloutStatistics:
    """Rewards and successes of the rollouts that came in since the last batch, filtered ones included."""

    rewards: list[float] = field(default_factory=list)
    successes: int = 0

    def add(self, group: Group) -> None:
        self.rewards += [rollout.reward for rollout in group.rollouts]
        self.successes += sum(rollout.success for rollout in group.rollouts)

    def take(self) -> dict[str, float]:
        """Means since the last call; empty if nothing came in."""
        count = len(self.rewards)
        if not count:
            return {}
        means = {
            "preprocessor/reward_mean": sum(self.rewards) / count,
            "preprocessor/success_rate": self.successes / count,
        }
        self.rewards, self.successes = [], 0
        return means


class Intake:
    """Digests groups; remembers what is settled so that a group that is read twice has one effect."""

    def __init__(
        self, config: FinetuneConfig, resume: ResumePoint, add_reference: ReferenceScorer | None = None
    ) -> None:
        self._config = config
        self._seen_groups = resume.dispatched_groups
        self._settled_samples = resume.settled_samples
        self._is_rolled_back = resume.is_rolled_back
        self._add_reference = add_reference
        self.statistics = RolloutStatistics()

    def digest(self, entries: Sequence[Entry[Group]]) -> list[tuple[ReadyGroup, list[Rejection]]]:
        """Score and filter some groups; those seen before are left out."""
        fresh = []
        for entry in entries:
            if entry.record.id not in self._seen_groups:
                self._seen_groups.add(entry.record.id)
                self.statistics.add(entry.record)
                fresh.append(entry)
        checked = [reject_faulty(entry.record.samples) for entry in fresh]
        if self._add_reference is not None:
            checked = self._with_reference(checked, self._add_reference)
        return [self._score(entry, *split) for entry, split in zip(fresh, checked, strict=True)]

    def _score(
        self, entry: Entry[Group], good: list[Sample], rejections: list[Rejection]
    ) -> tuple[ReadyGroup, list[Rejection]]:
        group = entry.record
        without_samples = [rollout.reward for rollout in group.rollouts if rollout.num_samples == 0]
        scored = score_group(good, without_samples, self._config.rl) if good else []
        rewards = [rollout.reward for rollout in group.rollouts]
        kept, untrainable = reject_untrainable(scored, self._config, rewards)
        gone = [Rejection(item.sample, "stale", "rolled_back") for item in kept if self._is_rolled_back(item.sample)]
        settled = self._settled_samples
        new = [r for r in [*rejections, *untrainable, *gone] if r.sample.id not in settled]
        lost = {rejection.sample.id for rejection in gone}
        unsettled = tuple(item for item in kept if item.sample.id not in settled and item.sample.id not in lost)
        return ReadyGroup(group.id, entry.offset, unsettled, group.epochs_done), new

    def _with_reference(
        self, checked: list[tuple[list[Sample], list[Rejection]]], add_reference: ReferenceScorer
    ) -> list[tuple[list[Sample], list[Rejection]]]:
        """Reference log-probs for all samples of all groups in one go; those too long to train are spared."""
        wanted = [s for good, _ in checked for s in good if s.num_trained_tokens and fits(s, self._config)]
        scored = {old.id: new for old, new in zip(wanted, add_reference(wanted), strict=True)}
        result = []
        for good, rejections in checked:
            kept = [new for s in good if (new := scored.get(s.id, s)) is not None]
            lost = [Rejection(s, "failed", "no_ref_logprobs") for s in good if scored.get(s.id, s) is None]
            result.append((kept, [*rejections, *lost]))
        return result
