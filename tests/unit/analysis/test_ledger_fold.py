"""One fate for every sample, along the lineage of checkpoints (lines D1 and D7)."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.short_sample import fate_record, step_done

from pipelinerl.analysis.audit import audit_run, compare_lengths, length_quantiles
from pipelinerl.analysis.ledger import RunRecords, build_ledger
from pipelinerl.config import RunConfig
from pipelinerl.records import (
    BatchHead,
    FateRecord,
    GroupHead,
    SampleHead,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    VersionSpan,
)
from pipelinerl.rundir.layout import RunDir, RunIdentity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import StartedRun
from pipelinerl.world import WorldMap


def sample(name: str, tokens: int = 10, version: int = 0) -> SampleHead:
    return SampleHead(id=name, output_tokens=tokens, version_spans=[VersionSpan(version, 0, tokens)])


def batch(step: int, *names: str) -> BatchHead:
    return BatchHead(step=step, samples=[sample(name) for name in names])


def fate(kind: Any, *names: str, version: int = 0, inc: int = 0, reason: str = "r", rollouts: int = 0) -> FateRecord:
    more = {"version": version, "incarnation": inc, "reason": reason, "num_rollouts": rollouts}
    return fate_record(kind, *names, output_tokens=10 * len(names), **more)


def done(step: int, inc: int = 0) -> StepDone:
    return step_done(step, incarnation=inc)


def started(step: int, inc: int = 0) -> TrainerStarted:
    return TrainerStarted(step=step, data_offset=step, time=0, incarnation=inc)


GROUPS = [GroupHead(id="g", samples=[sample(name) for name in "abcdefg"])]


def clean_run() -> RunRecords:
    """a b trained in step 1, c d in step 2 of incarnation 0; it is rolled back and taken again; e is dropped."""
    return RunRecords(
        messages=[started(0), done(1), done(2), started(1, inc=1), done(2, inc=1)],
        fates=[
            fate("trained", "a", "b", version=1),
            fate("trained", "c", "d", version=2),
            fate("trained", "c", "d", version=2, inc=1),
            fate("stale", "e", reason="dropped_oldest"),
            fate("pending", rollouts=4),
            fate("failed", reason="rollout_timeout", rollouts=1),
        ],
        batches=[batch(1, "a", "b"), batch(2, "c", "d"), batch(3, "f")],
        groups=GROUPS,
    )


def test_d7_the_fates_add_up_to_what_was_submitted() -> None:
    ledger = build_ledger(clean_run())
    assert ledger.faults == []
    assert ledger.submitted == 7
    assert ledger.counts() == {"trained": 4, "filtered": 0, "stale": 1, "failed": 0, "unused": 0, "pending": 2}
    assert ledger.tokens() == {"trained": 40, "filtered": 0, "stale": 10, "failed": 0, "unused": 0, "pending": 20}
    assert ledger.rolled_back_samples == 2
    assert ledger.rollouts == {"started": 4, "failed": 1, "failed/rollout_timeout": 1}


def test_d1_a_step_that_was_rolled_back_trained_nothing() -> None:
    evidence = clean_run()
    before = RunRecords(evidence.messages[:-1], [f for f in evidence.fates if f.incarnation == 0], *_rest(evidence))
    ledger = build_ledger(before)
    assert ledger.faults == []
    assert ledger.counts()["trained"] == 2 and ledger.counts()["pending"] == 4


def _rest(evidence: RunRecords) -> tuple[list[BatchHead], list[GroupHead]]:
    return evidence.batches, evidence.groups


def test_finished_samples_of_a_group_that_was_given_up_are_counted() -> None:
    evidence = clean_run()
    evidence.fates.append(fate("unused", "x", "y", reason="training_done", rollouts=4))
    ledger = build_ledger(evidence)
    assert ledger.faults == [] and ledger.submitted == 9
    assert ledger.counts()["unused"] == 2 and ledger.tokens()["unused"] == 20
    assert (ledger.rollouts["failed"], ledger.rollouts["unused"]) == (1, 4), "failures are failures alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.groups.append(GroupHead(id="h", samples=[sample("a")])), "published twice: a"),
        (lambda e: e.fates.append(fate("filtered", "e")), r"\be \(stale, filtered\)"),
        (lambda e: e.fates.append(fate("filtered", "z")), r"submitted\b.*: z\b"),
        (lambda e: e.fates.append(fate("filtered", "f")), r"\bf \(filtered\)"),
        (lambda e: e.fates.append(fate("trained", "g", version=2, inc=1)), r"\bg \(trained\)"),
        (lambda e: e.fates.pop(0), r"\ba, b\b"),
        (lambda e: e.batches.append(batch(4, "a")), "in two batches: a"),
        (lambda e: e.batches.append(batch(4, "z")), r"published\b.*: z\b"),
        (lambda e: e.batches.append(batch(3, "g")), "offset 3 holds the batch of step 3, not 4"),
        (lambda e: e.messages.append(done(4, inc=1)), r"steps \[3\] .* step 4"),
        (lambda e: e.batches.pop(1), "training_data offset 1 holds the batch of step 3, not 2"),
    ],
)
def test_what_must_not_be_is_said(change: Any, message: str) -> None:
    evidence = clean_run()
    evidence = RunRecords(list(evidence.messages), list(evidence.fates), list(evidence.batches), list(evidence.groups))
    change(evidence)
    faults = build_ledger(evidence).faults
    assert faults
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("; ".join(faults))


def test_d8_a_sample_of_a_later_version_than_its_batch_is_a_fault() -> None:
    evidence = clean_run()
    evidence.groups[0].samples[5] = sample("f", version=3)
    try:
        assert re.search(r"\bf\b", build_ledger(evidence).faults[0])
    finally:
        evidence.groups[0].samples[5] = sample("f")


def test_lengths_are_compared_by_hand() -> None:
    assert length_quantiles([]).count == 0
    found = length_quantiles([4, 1, 3, 2])
    assert (found.mean, found.p10, found.p50, found.p90, found.max) == (2.5, 1, 2, 4, 4)
    # Pairs (trained, lost): 1<2, 3>2, 1<3, 3=3: two wins and one tie of four.
    assert compare_lengths([1, 3], [2, 3]).longer_share == 2.5 / 4
    assert compare_lengths([1], []).longer_share is None
    rng = random.Random(3)
    same = [[rng.randint(1, 50) for _ in range(400)] for _ in range(2)]
    assert abs((compare_lengths(*same).longer_share or 0) - 0.5) < 0.05


def test_d5_a_corrupt_record_is_a_fault_with_file_and_offset_and_a_torn_tail_is_none(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    files = RunDir(tmp_path)
    writer = StreamHub(config.streams, files, "run-a").writer("trainer", "finetune_0", TrainerMessage)
    writer.write(started(0))
    writer.close()
    shard = next((tmp_path / "streams" / "trainer").rglob("*.jsonl"))
    whole = shard.read_bytes()
    identity = RunIdentity(run_id="run-a", incarnation=0)
    run = StartedRun(files, identity, config, WorldMap([], "cpu", 1, "127.0.0.1", 1))
    shard.write_bytes(whole + whole[: len(whole) // 2])
    assert audit_run(run).is_clean
    shard.write_bytes(whole + b"{\x00\n" + whole)
    (fault,) = audit_run(run).faults
    assert str(shard) in fault and "offset 1" in fault
