"""Wire records of rollouts: what the actor publishes and what the trainer trains on.

Written by the actor (`Group`) and the preprocessor (`TrainingBatch`); read by the preprocessor and every trainer
rank. All records are frozen msgspec structs; this module imports no torch and knows no stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1
IGNORED_LABEL = -100


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """`[start, end)` of the sample's trained tokens were sampled by policy `version`.

    Example: `VersionSpan(3, 0, 5)` says that trained tokens 0..4 come from version 3.
    """

    version: int
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trainable token sequence.

    `input_ids` (length T) holds the prompt and output ids exactly as the server saw and sampled them. `labels`
    (length T) repeats `input_ids` where a token is trained and is -100 elsewhere. `logprobs` has one value for each
    trained token, in order: natural logs of the sampling distribution at the sampling temperature.
    `version_spans` cover the trained tokens without gaps. `advantage` is that of its group's estimator
    (`rl/advantages.py`), before KL in the reward and normalization; None until the preprocessor has seen the group.
    """

    id: str
    group_id: str
    rollout_id: str
    input_ids: list[int]
    labels: list[int]
    logprobs: list[float]
    reward: float
    finished: bool
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    version_spans: list[VersionSpan]
    temperature: float = 1.0
    ref_logprobs: list[float] = []
    advantage: float | None = None
    incarnation: int = 0
    metadata: dict[str, Any] = {}
    schema: int = SCHEMA_VERSION

    @property
    def num_trained_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def min_version(self) -> int:
        """Oldest policy version that sampled a token of this sample."""
        return min(span.version for span in self.version_spans)

    @property
    def max_version(self) -> int:
        return max(span.version for span in self.version_spans)


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one rollout came to, without its tokens. `metrics` are the numbers of the user's `BaseMetrics`."""

    rollout_id: str
    reward: float
    success: bool
    num_samples: int
    output_tokens: int
    latency_s: float
    metrics: dict[str, float] = {}


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts at one problem: one record of the stream `actor`, written at once when the last attempt ends.

    `failed_rollouts` counts attempts that ended without a sample; the group may still be trained on the others.
    `epochs_done` are the passes over the problems whose groups have all ended with this one, a part as a fraction.
    """

    id: str
    problem_id: str
    dataset_name: str
    samples: list[Sample]
    rollouts: list[RolloutSummary]
    failed_rollouts: int = 0
    epochs_done: float = 0.0
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class TrainingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one optimizer step: one record of the stream `training_data`.

    `plan[rank][micro_batch]` lists indices into `samples`. It was made for `len(plan)` ranks; a trainer with another
    number of ranks plans again with the same function. `step` counts from 1: the step turns version `step - 1` into
    version `step`. `actor_offset` is the offset in stream `actor` behind which no group is unsettled: a reader that
    resumes there misses nothing. `epochs_done` is the most that a group of the step says.
    """

    id: str
    step: int
    samples: list[Sample]
    group_ids: list[str]
    plan: list[list[list[int]]]
    actor_offset: int
    epochs_done: float = 0.0
    incarnation: int = 0
    metrics: dict[str, float] = {}
    schema: int = SCHEMA_VERSION
