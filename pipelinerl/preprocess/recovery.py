"""Where a restarted preprocessor goes on, read from what it wrote before. Called once at the start.

The stream `training_data` says which step comes next, which groups are in a batch already, and from which offset of
`actor` on groups may be unsettled; the own stream `fates` says which samples were dropped. Only the few fields that
are needed are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelinerl.records import BatchHead, FateRecord, Sample
from pipelinerl.streams.base import FATES_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all


@dataclass
class ResumePoint:
    """`next_step` to dispatch, `actor_offset` to read from, what is settled behind that offset, samples by step.
    `epochs_done` are the passes over the problems that the batches so far say.

    `first_steps[i]` is the first step that incarnation i made a batch for. A version from there on that an older
    incarnation sampled with came from a batch that is not in the stream any more (the machine lost it), so it is
    another policy than the one that has this number now.
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


def find_resume_point(streams: StreamHub, job_name: str, incarnation: int = 0) -> ResumePoint:
    """Scan the own streams; a first start gives the beginning of everything."""
    point = ResumePoint()
    for head in read_all(streams, TRAINING_DATA_TOPIC, job_name, BatchHead):
        point.next_step = max(point.next_step, head.step + 1)
        point.actor_offset = max(point.actor_offset, head.actor_offset)
        point.epochs_done = max(point.epochs_done, head.epochs_done)
        point.dispatched_groups.update(head.group_ids)
        point.step_samples[head.step] = len(head.samples)
        point.first_steps.setdefault(head.incarnation, head.step)
    point.first_steps.setdefault(incarnation, point.next_step)
    for fate in read_all(streams, FATES_TOPIC, job_name, FateRecord):
        if fate.fate != "pending":
            point.settled_samples.update(fate.sample_ids)
    return point
