"""What `samples` reads of a group: heads to choose from, without tokens, and whole groups for what was chosen.

Read by `samples.scan`. Pure.
"""

from __future__ import annotations

import msgspec

from pipelinerl.records import Group, RolloutSummary, Sample


class StoredSample(Sample, frozen=True, kw_only=True):
    """A `Sample` whose tokens may have been removed (`streams.retention=heads`): then there are none."""

    input_ids: list[int] = []
    labels: list[int] = []
    logprobs: list[float] = []


class StoredGroup(Group, frozen=True, kw_only=True):
    samples: list[StoredSample]  # type: ignore[assignment]


class StoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, with what is known of its group. `summary` is None for samples that no rollout of it names."""

    group: StoredGroup
    rollout_id: str
    summary: RolloutSummary | None
    samples: list[StoredSample]


def rollout_of(group: StoredGroup, rollout_id: str) -> StoredRollout:
    """The rollout `rollout_id` of `group`."""
    summary = next((each for each in group.rollouts if each.rollout_id == rollout_id), None)
    own = [sample for sample in group.samples if sample.rollout_id == rollout_id]
    return StoredRollout(group=group, rollout_id=rollout_id, summary=summary, samples=own)
