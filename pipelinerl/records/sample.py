"""Records with tokens: `Group` (actor), `TrainingBatch` (preprocessor), `EvaluationRollout`, and their heads.

A head has a subset of a record's fields, for readers that do not need the tokens. All records are frozen msgspec
structs. No torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: Incremented when an old reader would misread new records. 2: checksums, slots for experts and images.
SCHEMA_VERSION = 2
IGNORED_LABEL = -100


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """`[start, end)` of the sample's trained tokens were sampled by policy `version`.

    Example: `VersionSpan(3, 0, 5)` says that trained tokens 0..4 come from version 3.
    """

    version: int
    start: int
    end: int


class Array(msgspec.Struct, frozen=True):
    """A NumPy array: `dtype` in NumPy's notation, `shape`, and `data` in C order (base64 in JSON)."""

    dtype: str
    shape: list[int]
    data: bytes


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trainable token sequence.

    `input_ids` (length T) are the prompt and output ids exactly as the server saw and sampled them. `labels` (length T)
    repeat `input_ids` where a token is trained and are -100 elsewhere. `logprobs` has one value per trained token, in
    order: natural logs of the sampling distribution at the sampling temperature. `version_spans` cover the trained
    tokens without gaps. `advantage` comes from the group's estimator (`rl/advantages.py`), before KL in the reward and
    normalization; None until the preprocessor has seen the group.

    `routed_experts` (shape [T, layers, experts per token], -1 where unknown) and `multimodal` (model inputs by name)
    are reserved: nothing writes them yet, and the trainer rejects samples that have them.
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
    routed_experts: Array | msgspec.UnsetType = msgspec.UNSET
    multimodal: dict[str, Array] | msgspec.UnsetType = msgspec.UNSET
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
    """The result of one rollout, without tokens. `metrics` are the numbers of the user's `BaseMetrics`.

    `num_cut` of its samples were truncated by the token limit or the context length.
    """

    rollout_id: str
    reward: float
    success: bool
    num_samples: int
    output_tokens: int
    latency_s: float
    metrics: dict[str, float] = {}
    num_cut: int = 0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts at one problem: one record of the stream `actor`, written when the last attempt ends.

    `failed_rollouts` counts attempts that failed; the group may still be trained on the others. `epochs_done` is the
    number of passes over the problems (with a fraction) whose groups have all ended, this one included.
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
    """The data of one optimizer step: one record of the stream `training_data`.

    `plan[rank][micro_batch]` lists indices into `samples` for `len(plan)` ranks; a trainer with another number of ranks
    makes a new plan with the same function. `step` counts from 1 and turns version `step - 1` into version `step`.
    `actor_offset` is where to resume in stream `actor`: every group before it is settled. `epochs_done` is the highest
    of the step's groups.
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


class TokenRatios(msgspec.Struct, frozen=True, kw_only=True):
    """Importance ratios of the tokens that a rank trained in a step: stream `token_ratios`, for people to read.

    `log_ratios` (float16) has log pi - log mu of every trained token, with pi of the weights in training and mu as
    sampled, concatenated in the order of `sample_ids`; `lengths` are the numbers of trained tokens per sample.
    """

    step: int
    sample_ids: list[str]
    lengths: list[int]
    log_ratios: Array
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class EvaluationSample(Sample, frozen=True, kw_only=True):
    """One token sequence of an evaluation as the rollout returned it: unchecked, without log-probs, never trained.

    `prompt_text` and `output_text` replace the tokens if the rollout returned a text without ids. A text without a
    reward gets that of its rollout.
    """

    logprobs: list[float] = []
    prompt_text: str = ""
    output_text: str = ""


class EvaluationRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a held-out problem: stream `evaluation_rollouts`, for people to read.

    All rollouts of an evaluation share `group_id`. `problem` is JSON, possibly truncated. The evaluation was due at
    `due_version`; `min_version`/`max_version` answered this rollout. A failed rollout has no `summary`, but a `failure`
    (a short reason) and a `message`.
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


class SampleHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `Sample`, without tokens."""

    id: str
    rollout_id: str = ""
    reward: float = 0.0
    output_tokens: int = 0
    version_spans: list[VersionSpan] = []

    @property
    def min_version(self) -> int:
        return min((span.version for span in self.version_spans), default=0)

    @property
    def max_version(self) -> int:
        return max((span.version for span in self.version_spans), default=0)


class RolloutHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `RolloutSummary`."""

    rollout_id: str
    reward: float


class GroupHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `Group`."""

    id: str
    samples: list[SampleHead]
    dataset_name: str = ""
    rollouts: list[RolloutHead] = []
    schema: int = SCHEMA_VERSION


class BatchHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a `TrainingBatch`."""

    step: int
    samples: list[SampleHead]
    group_ids: list[str] = []
    actor_offset: int = 0
    epochs_done: float = 0.0
    incarnation: int = 0
    schema: int = SCHEMA_VERSION

    @property
    def sample_ids(self) -> list[str]:
        return [sample.id for sample in self.samples]
