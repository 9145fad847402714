"""Recorded rollouts of evaluations: which are looked at, and what is shown of them. Called by the command `samples`.

An evaluation that was cut off by a crash and made again is seen once: rollouts of the one without a result are left out
where another one of the same version has a result. Without any, they are shown and marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.errors import StreamError
from pipelinerl.records import (
    EvaluationResult,
    EvaluationRollout,
    EvaluationSample,
    GroupHead,
    RolloutHead,
    SampleHead,
    VersionSpan,
)
from pipelinerl.samples.choose import Candidate, Wanted
from pipelinerl.samples.decode import TokenText
from pipelinerl.samples.scan import Source
from pipelinerl.samples.view import EvaluationView, RolloutView, rollout_view, sample_view
from pipelinerl.streams.base import ACTOR, EVALUATION_ROLLOUTS_TOPIC, EVALUATION_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_entries

FATE = "not trained"


@dataclass(frozen=True)
class Evaluations:
    """Which evaluations have a result: the starts of the run that made one, by the version that it was due at and
    whether it was the final one."""

    made: dict[tuple[int, bool], set[int]] = field(default_factory=dict)

    def has_result(self, rollout: EvaluationRollout) -> bool:
        return rollout.incarnation in self.made.get((rollout.due_version, rollout.is_final), ())

    def is_repeated(self, rollout: EvaluationRollout) -> bool:
        """Whether its evaluation was cut off and made again."""
        return (rollout.due_version, rollout.is_final) in self.made and not self.has_result(rollout)


def find_evaluations(streams: StreamHub) -> Evaluations:
    """The evaluations that have a result by now. Raises StreamError if the stream cannot be read."""
    found = Evaluations()
    for entry in read_entries(streams, EVALUATION_TOPIC, ACTOR, EvaluationResult):
        result: EvaluationResult = entry.record
        if result.success_rate is not None:  # without it all its rollouts failed
            found.made.setdefault((result.due_version, result.is_final), set()).add(result.incarnation)
    return found


def evaluation_source(evaluations: Evaluations, wanted: Wanted, only_failed: bool, no_success: bool) -> Source:
    """Where rollouts of evaluations are chosen from.

    Args:
        evaluations: that have a result.
        wanted: as for rollouts of training; `version` is the one that an evaluation was due at.
        only_failed: rollouts that failed.
        no_success: rollouts that failed, or ended without success.
    """

    def wants(rollout: EvaluationRollout) -> bool:
        if wanted.order in ("best", "worst") and rollout.summary is None:
            return False  # no reward
        if only_failed and not rollout.failure:
            return False
        if no_success and rollout.summary is not None and rollout.summary.success:
            return False
        return wanted.name is not None or not evaluations.is_repeated(rollout)

    return Source(EVALUATION_ROLLOUTS_TOPIC, EvaluationRollout, _as_group, wants, ids_repeat=True)


def _as_group(rollout: EvaluationRollout) -> GroupHead:
    """One rollout in the form of a group. Its version is the one that it was due at, also if it failed."""
    due = [VersionSpan(rollout.due_version, 0, 0)]
    reward = rollout.summary.reward if rollout.summary else 0.0
    names = [sample.id for sample in rollout.samples] or [rollout.id]
    return GroupHead(
        id=rollout.group_id,
        dataset_name=rollout.dataset_name,
        samples=[SampleHead(id=name, rollout_id=rollout.id, reward=reward, version_spans=due) for name in names],
        rollouts=[RolloutHead(rollout_id=rollout.id, reward=reward)],
    )


def load_evaluations(streams: StreamHub, chosen: Iterable[Candidate]) -> Iterator[EvaluationRollout]:
    """The chosen rollouts, in the order of `chosen`. Raises StreamError if one cannot be read."""
    for candidate in chosen:
        place = candidate.offset
        entry = next(read_entries(streams, EVALUATION_ROLLOUTS_TOPIC, ACTOR, EvaluationRollout, place, place + 1), None)
        if entry is None:
            raise StreamError(f"stream {EVALUATION_ROLLOUTS_TOPIC}: the record at offset {place} is gone")
        yield entry.record


def view_of_evaluation(
    rollout: EvaluationRollout, has_result: bool, decoder: TokenText | None, max_chars: int
) -> RolloutView:
    """What to show of `rollout`; of each text at most `max_chars` characters (0: all)."""
    return rollout_view(
        dataset=rollout.dataset_name,
        problem_id=rollout.problem_id,
        group_id=rollout.group_id,
        rollout_id=rollout.id,
        incarnation=rollout.incarnation,
        summary=rollout.summary,
        samples=[_sample(each, decoder, max_chars) for each in rollout.samples],
        evaluation=EvaluationView(
            due_version=rollout.due_version,
            is_final=rollout.is_final,
            has_result=has_result,
            min_version=rollout.min_version,
            max_version=rollout.max_version,
            problem=rollout.problem,
            failure=rollout.failure,
            message=rollout.message,
        ),
    )


def _sample(sample: EvaluationSample, decoder: TokenText | None, max_chars: int) -> Any:
    texts = (sample.prompt_text, sample.output_text) if not sample.input_ids else None
    return sample_view(sample, decoder, FATE, max_chars, is_trained=False, texts=texts)
