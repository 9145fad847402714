"""Control messages, fates, metrics and evaluation results: everything on the wire that is not a rollout.

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
    """The `time` of a record: seconds since the epoch by the clock at the start of this process. Durations are
    differences of it, so a clock that is set meanwhile must not show."""
    return _STARTED_AT + time.monotonic()


class TrainerStarted(msgspec.Struct, frozen=True, kw_only=True, tag="trainer_started"):
    """First message of an incarnation: it trains on from `step`, with record `data_offset` of `training_data` next.

    What older incarnations trained after `step` was rolled back; those batches are trained again as they are.
    """

    step: int
    data_offset: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class WeightUpdateSuccess(msgspec.Struct, frozen=True, kw_only=True, tag="weight_update_success"):
    """Every live server samples with `version` from now on. `seconds` holds the phases pause, transfer, load, resume
    and total; `probe_abs_diff` is the mean |log-prob difference| of trainer and server if this update was probed;
    `sent_bytes` are those of the tensors that each server got."""

    version: int
    time: float
    seconds: dict[str, float]
    num_servers: int
    probe_abs_diff: float | None = None
    sent_bytes: int | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class StepEnding(msgspec.Struct, frozen=True, kw_only=True, tag="step_ending"):
    """The last micro-batch of the optimizer step `step` begins; the servers get new weights right after it."""

    step: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step_done"):
    """The optimizer step `step` is done; its samples are settled as trained. Sent after the weights were sent.

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
    """No further step will follow; `version` is final and was delivered to the servers."""

    version: int
    time: float
    samples_processed: int
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


TrainerMessage = TrainerStarted | WeightUpdateSuccess | StepEnding | StepDone | TrainingDone


class PassesOver(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of `finetune.max_epochs` are over and no batch follows that of `step`: stream `passes`, written by the
    preprocessor where too little was left to train for a batch that would end training."""

    step: int
    max_epochs: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer rank 0 to the actor: start no rollout until the servers have `version`, and say when none runs.

    Stream `turns`, one instance per process; for every schedule but `pipeline`. Rollouts start again when the update
    of that version, or a later one, is on the stream `trainer`.
    """

    version: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class RolloutsPaused(msgspec.Struct, frozen=True, kw_only=True):
    """The actor's answer: no rollout runs, and none starts before the servers have `version`."""

    version: int
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class FateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How samples ended: stream `fates`, one instance per process, written before the process acts on it.

    `group_id` names their group; `num_rollouts` rollouts of it are settled too, with or without samples. `failed`: a
    rollout or a sample could not be used; `unused`: nothing was wrong, but its group was cut off by the end of
    training or of the process. The actor writes `pending` with the number of its rollouts when it starts a group: the
    only fate that is not final.
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
    """Numbers of one process at one moment: stream `metrics`, one instance per process.

    `values` keys are `<role>/<thing>_<unit>`; `step` is the policy version that they belong to.
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

    `due_version` is the version that it was due at; `min_version`/`max_version` are those that sampled its tokens.
    Where no rollout finished there are no averages: `success_rate`, `mean_reward`, `output_tokens` (mean of a rollout)
    and `cut_fraction` (rollouts with a sample that was cut off) are None together. The first two are means over
    problems. `estimates` has `avg_at_<k>` and `pass_at_<j>` over `num_problems` problems with `attempts` samples each,
    or more (`actor/estimates.py`).
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
    """Launcher: a server came up (`up`), is gone for now (`down`), or leaves for good (`removed`): stream `pool`.

    A server may sample for training while the newest `ServerReady` is about its newest start.

    `generation` counts the starts of this server: 0 is the start with the run, about which no `up` is written. A
    `down` is about the start that ended. `group_port` is the port of its transfer group on the trainer's machine, None:
    any.
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
    """Trainer: start `generation` of this server samples with `version`, and its log-probs agree."""

    name: str
    generation: int
    version: int
    time: float
    probe_abs_diff: float | None = None
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


class ServerDropped(msgspec.Struct, frozen=True, kw_only=True, tag="server_dropped"):
    """Trainer: start `generation` of this server could not be given the weights; `error` says why."""

    name: str
    generation: int
    error: str
    time: float
    incarnation: int = 0
    schema: int = SCHEMA_VERSION


PoolAnswer = ServerReady | ServerDropped
