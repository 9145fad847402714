"""Rollouts of evaluations, to be read by people: stream `evaluation_rollouts`, written by the actor, never trained."""

from __future__ import annotations

import msgspec

from pipelinerl.records.sample import SCHEMA_VERSION, RolloutSummary, Sample


class EvaluationSample(Sample, frozen=True, kw_only=True):
    """One token sequence of an evaluation, as the rollout returned it: unchecked, and without log-probs.

    `prompt_text` and `output_text` stand for the tokens where the rollout returned a text without ids. A text without a
    reward has that of its rollout.
    """

    logprobs: list[float] = []
    prompt_text: str = ""
    output_text: str = ""


class EvaluationRollout(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt at a held-out problem ended.

    `group_id` names the evaluation, all of whose rollouts share it. `problem` is the problem as JSON, maybe cut.
    `due_version` is the version that the evaluation was due at, `min_version`/`max_version` those that answered this
    rollout. A rollout that failed has no `summary`, but a `failure` (a short word) and a `message`.
    """

    id: str
    group_id: str
    problem_id: str
    dataset_name: str
    problem: str
    due_version: int
    is_final: bool
    samples: list[EvaluationSample] = []
    summary: RolloutSummary | None = None
    min_version: int | None = None
    max_version: int | None = None
    failure: str = ""
    message: str = ""
    incarnation: int = 0
    schema: int = SCHEMA_VERSION
