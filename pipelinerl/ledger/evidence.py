"""Reads what the ledger needs from a run's streams; tokens and log-probs are skipped, not loaded.

Called by `audit_run`. A run may go on meanwhile: streams are read against the direction of the data (the trainer's
first, the actor's last), so that whatever is seen has its cause in what is read later. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.records import BatchHead, FateRecord, GroupHead, TrainerMessage
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
