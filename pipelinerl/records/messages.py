"""Control messages, fates, metrics and evaluation results: all stream records without tokens.

`TrainerMessage` is the type of the stream `trainer` (written by trainer rank 0, read by actor, preprocessor and
launcher). `FateRecord`, `MetricRecord` and `EvaluationResult` have streams of their own.
"""

from __future__ import annotations

import time
from typing import Literal, get_args

import msgspec

from pipelinerl.records.sample import SCHEMA_VERSION

Fate = Literal["trained", "filtered", "stale", "failed", "unused", "pending"]
FATES: tuple[Fate, ...] = get_args(Fate)

_STARTED_AT = time.time() - time.monotonic()


def record_time() -> float:
    """The `time` of a record in seconds since the epoch. Monotonic, so that durations are right when the clock is
    set."""
    return _STARTED_AT + time.monotonic()


class TrainerStarted(msgspec.Struct, frozen=True, kw_only=True, tag="trainer_started"):
    """First message of an incarnation: it continues from `step`; record `data_offset` of `training_data` is next.

    Steps of older incarnations after `step` are rolled back; their batches are trained again unchanged.
    """

    step: int
    data_offset: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class WeightUpdateSuccess(msgspec.Struct, frozen=True, kw_only=True, tag="weight_update_success"):
    """All live servers now sample with `version`. `seconds` has the phases pause, transfer, load, resume and total;
    `probe_abs_diff` is the mean |log-prob difference| between trainer and server if this update was probed;
    `sent_bytes` counts the tensors that each server received."""

    version: int
    time: float
    seconds: dict[str, float]
    num_servers: int
    probe_abs_diff: float | None = None
    sent_bytes: int | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class StepEnding(msgspec.Struct, frozen=True, kw_only=True, tag="step_ending"):
    """The last micro-batch of optimizer step `step` begins; new weights follow right after it."""

    step: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step_done"):
    """Optimizer step `step` is done and its samples are settled as trained. Written after the weights were sent.

    `wait_data_s`: how long the trainer waited for the batch of this step.
    """

    step: int
    time: float
    group_ids: list[str]
    num_samples: int
    samples_processed: int
    wait_data_s: float = 0.0
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class TrainingDone(msgspec.Struct, frozen=True, kw_only=True, tag="training_done"):
    """Training is complete; the servers have the final `version`."""

    version: int
    time: float
    samples_processed: int
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


TrainerMessage = TrainerStarted | WeightUpdateSuccess | StepEnding | StepDone | TrainingDone


class PassesOver(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of `finetune.max_epochs` are over and the batch of `step` was the last one: stream `passes`, written
    by the preprocessor when too few samples are left for another batch."""

    step: int
    max_epochs: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer rank 0 to the actor: start no rollouts until the servers have `version`, and report when none is running.

    Stream `turns`, one instance per process; for every schedule but `pipeline`. Rollouts start again with the update to
    that version or a later one.
    """

    version: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class RolloutsPaused(msgspec.Struct, frozen=True, kw_only=True):
    """The actor's answer: no rollout is running, and none starts before the servers have `version`."""

    version: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class FateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How samples of group `group_id` ended: stream `fates`, one instance per process, written before acting on it.

    `num_rollouts` rollouts of the group are settled too, with or without samples. `failed`: a rollout or a sample was
    unusable; `unused`: it was fine, but training or the process ended first. `pending` is the only fate that is not
    final: the actor writes it, with the number of rollouts, when it starts a group.
    """

    sample_ids: list[str]
    fate: Fate
    reason: str
    version: int
    group_id: str
    source: str
    output_tokens: int = 0
    num_rollouts: int = 0
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one process at one moment: stream `metrics`, one instance per process.

    Keys of `values` are `<role>/<thing>_<unit>`; `step` is the policy version that they belong to.
    """

    source: str
    step: int
    time: float
    values: dict[str, float]
    schema: int = SCHEMA_VERSION


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimated probability with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation on the held-out problems: stream `evaluation`, written by the actor.

    It was due at `due_version`; `min_version`/`max_version` sampled its tokens. `success_rate` and `mean_reward` (means
    over problems), `output_tokens` (mean per rollout) and `cut_fraction` (share of rollouts with a truncated sample)
    are all None if no rollout finished. `estimates` has `avg_at_<k>` and `pass_at_<j>` over `num_problems` problems
    with `attempts` samples each, or more (`actor/estimates.py`).
    """

    due_version: int
    min_version: int
    max_version: int
    is_final: bool
    dataset_name: str
    num_rollouts: int
    num_failed: int
    success_rate: float | None
    mean_reward: float | None
    metrics: dict[str, float]
    seconds: float
    time: float
    num_problems: int = 0
    attempts: int = 1
    estimates: dict[str, Estimate] = {}
    output_tokens: float | None = None
    cut_fraction: float | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class PoolChange(msgspec.Struct, frozen=True, kw_only=True):
    """Launcher: a server came up (`up`), is gone for now (`down`), or left for good (`removed`): stream `pool`.

    A server samples for training while the newest `ServerReady` is about its newest start.

    `generation` counts the starts of this server; 0 is the start with the run, for which no `up` is written. `down`
    names the start that ended. `group_port` is the port of its transfer group on the trainer's machine (None: any).
    """

    name: str
    url: str
    event: Literal["up", "down", "removed"]
    generation: int
    time: float
    reason: str = ""
    group_port: int | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class ServerReady(msgspec.Struct, frozen=True, kw_only=True, tag="server_ready"):
    """Trainer: start `generation` of this server has `version`, and its log-probs agree."""

    name: str
    generation: int
    version: int
    time: float
    probe_abs_diff: float | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class ServerDropped(msgspec.Struct, frozen=True, kw_only=True, tag="server_dropped"):
    """Trainer: start `generation` of this server could not load the weights; `error` says why."""

    name: str
    generation: int
    error: str
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


PoolAnswer = ServerReady | ServerDropped
