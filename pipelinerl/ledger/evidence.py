"""Reads what the ledger needs from a run's streams; tokens and log-probs are skipped, not loaded.

Called by `audit_run`. A run may go on meanwhile: streams are read against the direction of the data (the trainer's
first, the actor's last), so that whatever is seen has its cause in what is read later. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipelinerl.records import SCHEMA_VERSION, FateRecord, TrainerMessage, VersionSpan
from pipelinerl.streams.base import (
    ACTOR,
    ACTOR_TOPIC,
    FATES_TOPIC,
    PREPROCESSOR,
    TRAINER,
    TRAINER_TOPIC,
    TRAINING_DATA_TOPIC,
)
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_all


class SampleHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `Sample` that say what it is, without its tokens."""

    id: str
    output_tokens: int
    version_spans: list[VersionSpan] = []

    @property
    def max_version(self) -> int:
        return max((span.version for span in self.version_spans), default=0)

    @property
    def min_version(self) -> int:
        return min((span.version for span in self.version_spans), default=0)


class GroupHead(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    samples: list[SampleHead]
    schema: int = SCHEMA_VERSION


class BatchHead(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    samples: list[SampleHead]
    schema: int = SCHEMA_VERSION

    @property
    def sample_ids(self) -> list[str]:
        return [sample.id for sample in self.samples]


@dataclass(frozen=True)
class Evidence:
    """The records of one run that its ledger is folded from, each list in the order of its stream."""

    messages: list[TrainerMessage]
    fates: list[FateRecord]
    batches: list[BatchHead]
    groups: list[GroupHead]


def read_evidence(streams: StreamHub) -> Evidence:
    """Read all of it. Raises StreamError for a corrupt record, with file, offset and reason."""
    messages = list(read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage))
    fates = list(read_all(streams, FATES_TOPIC, TRAINER, FateRecord))
    fates += read_all(streams, FATES_TOPIC, PREPROCESSOR, FateRecord)
    batches = list(read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, BatchHead))
    groups = list(read_all(streams, ACTOR_TOPIC, ACTOR, GroupHead))
    fates += read_all(streams, FATES_TOPIC, ACTOR, FateRecord)
    return Evidence(messages, fates, batches, groups)
