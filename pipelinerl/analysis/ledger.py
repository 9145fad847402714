"""The fate of every sample of a run, reconstructed from its streams.

Every process writes the fates that it decides. Those of actor and preprocessor are final. `trained` counts if the step
is in the lineage of the newest checkpoint: a step that was rolled back trained nothing, and its samples are pending
until it is repeated. A sample without a fate is pending, in a batch or not.

A running run keeps writing, so streams are read from the end of the pipeline to its beginning: the trainer's first, the
actor's last. The cause of whatever was seen is then in a stream that is read later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipelinerl.records import FATES, BatchHead, Fate, FateRecord, GroupHead, SampleHead, StepDone, TrainerMessage
from pipelinerl.records.lineage import Lineage
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
class RunRecords:
    """The records of one run, each list in stream order."""

    messages: list[TrainerMessage]
    fates: list[FateRecord]
    batches: list[BatchHead]
    groups: list[GroupHead]


def read_records(streams: StreamHub) -> RunRecords:
    """Read all records. Raises StreamError for a corrupt one, with file, offset and reason."""
    messages = list(read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage))
    fates = list(read_all(streams, FATES_TOPIC, TRAINER, FateRecord))
    fates += read_all(streams, FATES_TOPIC, PREPROCESSOR, FateRecord)
    batches = list(read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, BatchHead))
    groups = list(read_all(streams, ACTOR_TOPIC, ACTOR, GroupHead))
    fates += read_all(streams, FATES_TOPIC, ACTOR, FateRecord)
    return RunRecords(messages, fates, batches, groups)


SHOWN = 5


@dataclass
class Ledger:
    """Samples, fates and steps of a run. `faults` describes every violation; empty: clean."""

    samples: dict[str, SampleHead] = field(default_factory=dict)
    unpublished: set[str] = field(default_factory=set)
    fates: dict[str, Fate] = field(default_factory=dict)
    reasons: Counter[tuple[Fate, str]] = field(default_factory=Counter)
    batch_of: dict[str, int] = field(default_factory=dict)
    trained_at: dict[str, int] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    rolled_back_samples: int = 0
    unpublished_tokens: Counter[Fate] = field(default_factory=Counter)
    rollouts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def submitted(self) -> int:
        """Samples that the actor produced: published ones, and finished ones of abandoned groups."""
        return len(self.samples) + len(self.unpublished)

    def counts(self) -> dict[Fate, int]:
        """Samples by fate, pending ones included."""
        counts: Counter[Fate] = Counter(dict.fromkeys(FATES, 0))
        counts.update(self.fates.values())
        counts["pending"] += sum(1 for name in self.samples if name not in self.fates)
        return dict(counts)

    def tokens(self) -> dict[Fate, int]:
        """Output tokens by fate."""
        totals: dict[Fate, int] = {fate: self.unpublished_tokens[fate] for fate in FATES}
        for name, sample in self.samples.items():
            totals[self.fates.get(name, "pending")] += sample.output_tokens
        return totals

    def max_lag_versions(self) -> int:
        """Largest age of a trained token, in versions."""
        lags = (step - 1 - self.samples[n].min_version for n, step in self.trained_at.items() if n in self.samples)
        return max(lags, default=0)

    def fault(self, what: str, names: list[str]) -> None:
        """Add one fault about some samples, if there are any."""
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            self.faults.append(f"{what}: {', '.join(names[:SHOWN])}{more}")


def build_ledger(records: RunRecords) -> Ledger:
    """Build the ledger and check it."""
    ledger = Ledger()
    for message in records.messages:
        ledger.lineage.add(message)
    _add_groups(ledger, records)
    _add_batches(ledger, records)
    _add_fates(ledger, records)
    _check_steps(ledger, records)
    if sum(ledger.counts().values()) != ledger.submitted:
        ledger.faults.append(f"{ledger.submitted} samples were submitted, the fates add up to {ledger.counts()}")
    return ledger


def _add_groups(ledger: Ledger, records: RunRecords) -> None:
    twice = []
    for group in records.groups:
        for sample in group.samples:
            if sample.id in ledger.samples:
                twice.append(sample.id)
            ledger.samples[sample.id] = sample
    ledger.fault("published twice", twice)


def _add_batches(ledger: Ledger, records: RunRecords) -> None:
    steps = [batch.step for batch in records.batches]
    if steps != list(range(1, len(steps) + 1)):
        first = next(n for n, step in enumerate(steps) if step != n + 1)
        ledger.faults.append(f"training_data offset {first} holds the batch of step {steps[first]}, not {first + 1}")
    twice, unknown, future = [], [], []
    for batch in records.batches:
        for name in batch.sample_ids:
            if name in ledger.batch_of:
                twice.append(name)
            ledger.batch_of[name] = batch.step
            if name not in ledger.samples:
                unknown.append(name)
            elif ledger.samples[name].max_version >= batch.step:
                future.append(name)
    ledger.fault("in two batches", twice)
    ledger.fault("in a batch, but never published", unknown)
    ledger.fault("in the batch of a version that is older than the one that sampled it", future)


def _add_fates(ledger: Ledger, records: RunRecords) -> None:
    twice, unknown, elsewhere = [], [], []
    for record in records.fates:
        if record.fate == "pending":
            ledger.rollouts["started"] += record.num_rollouts
            continue
        if record.fate == "trained" and not ledger.lineage.survives(record.incarnation, record.version):
            ledger.rolled_back_samples += len(record.sample_ids)
            continue
        if record.num_rollouts:
            ledger.rollouts[record.fate] += record.num_rollouts
            ledger.rollouts[f"{record.fate}/{record.reason}"] += record.num_rollouts
            # Finished samples of a group that the actor abandoned are in no other record.
            ledger.unpublished.update(name for name in record.sample_ids if name not in ledger.samples)
            ledger.unpublished_tokens[record.fate] += record.output_tokens
        for name in record.sample_ids:
            if name in ledger.fates:
                twice.append(f"{name} ({ledger.fates[name]}, {record.fate})")
            if name not in ledger.samples and name not in ledger.unpublished:
                unknown.append(name)
            if (record.fate == "trained") != (name in ledger.batch_of) or (
                record.fate == "trained" and ledger.batch_of[name] != record.version
            ):
                elsewhere.append(f"{name} ({record.fate})")
            ledger.fates[name] = record.fate
            ledger.reasons[record.fate, record.reason] += 1
            if record.fate == "trained":
                ledger.trained_at[name] = record.version
    ledger.fault("more than one fate", twice)
    ledger.fault("a fate, but never submitted", unknown)
    ledger.fault("the fate and the batches disagree", elsewhere)


def _check_steps(ledger: Ledger, records: RunRecords) -> None:
    """Every step that counts trained exactly its batch."""
    done = {
        message.step
        for message in records.messages
        if isinstance(message, StepDone) and ledger.lineage.survives(message.incarnation, message.step)
    }
    if done != set(range(1, len(done) + 1)):
        missing = sorted(set(range(1, max(done) + 1)) - done)
        ledger.faults.append(f"steps {missing[:SHOWN]} are missing in the lineage of step {max(done)}")
    forgotten = [
        name
        for batch in records.batches
        if batch.step in done
        for name in batch.sample_ids
        if ledger.fates.get(name) != "trained"
    ]
    ledger.fault("in a trained batch, but without that fate", forgotten)
    without = sorted(done - {batch.step for batch in records.batches})
    if without:
        ledger.faults.append(f"steps {without[:SHOWN]} have no batch")
