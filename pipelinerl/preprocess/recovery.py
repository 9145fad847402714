"""Where a restarted preprocessor resumes, read from its own streams.

The stream `training_data` says which step comes next, which groups are already in a batch, and from which offset of
`actor` on groups may be unsettled; its stream `fates` says which samples were dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelinerl.records import BatchHead, FateRecord, Sample
from pipelinerl.streams.base import FATES_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all


@dataclass
class ResumePoint:
    """What the streams say.

    Attributes:
        next_step: step of the next batch.
        actor_offset: offset in `actor` to read from; `dispatched_groups` and `settled_samples` after it are done.
        epochs_done: passes over the problems at the last batch.
        first_steps: by incarnation, the first step that it made a batch for. If an older incarnation sampled with a
            version from that step on, the batch of that version was lost with the machine, so the version is not the
            policy that has this number now.
        step_samples: number of samples by step.
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
    """Scan the streams; before the first batch everything is at its beginning."""
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
