"""Frozen wire records and their codec. No torch, no I/O."""

from pipelinerl.records.evaluation import EvaluationRollout, EvaluationSample
from pipelinerl.records.messages import (
    EvaluationResult,
    Fate,
    FateRecord,
    MetricRecord,
    PassesOver,
    PauseRequest,
    RolloutsPaused,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.records.pool import PoolAnswer, PoolChange, ServerDropped, ServerReady
from pipelinerl.records.sample import (
    IGNORED_LABEL,
    SCHEMA_VERSION,
    Group,
    RolloutSummary,
    Sample,
    TrainingBatch,
    VersionSpan,
)

__all__ = [
    "IGNORED_LABEL",
    "SCHEMA_VERSION",
    "EvaluationResult",
    "EvaluationRollout",
    "EvaluationSample",
    "Fate",
    "FateRecord",
    "Group",
    "MetricRecord",
    "PassesOver",
    "PauseRequest",
    "PoolAnswer",
    "PoolChange",
    "RolloutSummary",
    "RolloutsPaused",
    "Sample",
    "ServerDropped",
    "ServerReady",
    "StepDone",
    "TrainerMessage",
    "TrainerStarted",
    "TrainingBatch",
    "TrainingDone",
    "VersionSpan",
    "WeightUpdateSuccess",
]
