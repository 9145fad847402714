"""Cuts at any write, resume after each: one fate for every sample, nobody waits for ever, the lag stays bounded.

Lines D1, D7, D8 and L7. One test is hundreds of starts of a run in one thread (see `fakes.crash_run`).
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from fakes.crash_run import CrashRun, Cutter, Killed

from pipelinerl.analysis.ledger import Ledger, RunRecords, build_ledger, read_records
from pipelinerl.config import RunConfig
from pipelinerl.streams.files import FileWriter

STEPS = 12
BATCH = 8


def seeds(count: int) -> list[Any]:
    """The first two are quick, the others are `slow`."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(count)]


def crash_run(root: Path, seed: int, **config: Any) -> CrashRun:
    finetune = {"train_batch_size": 1, "gradient_accumulation_passes": BATCH, "seq_length": 64}
    settings = {"output_dir": str(root), "attempts": 2, **config}
    settings["finetune"] = {**finetune, **config.get("finetune", {})}
    return CrashRun(root, random.Random(seed), RunConfig.model_validate(settings))


def run_with_cuts(run: CrashRun, monkeypatch: pytest.MonkeyPatch, cuts: int) -> Ledger:
    """Cut `cuts` times, check the ledger after every cut, then train to the end; returns the last ledger."""
    original = FileWriter._append
    for number in range(cuts + 1):
        cutter = Cutter(run.rng, run.rng.randint(1, 120) if number < cuts else 10**9)
        monkeypatch.setattr(FileWriter, "_append", lambda writer, line, c=cutter: c.append(original, writer, line))
        try:
            run.incarnation(number, STEPS)
        except Killed:
            assert number < cuts
        ledger = audit(run)
        assert ledger.faults == []
        if ledger.lineage.last_step >= STEPS:
            break
    return ledger


def evidence_of(run: CrashRun) -> RunRecords:
    with contextlib.closing(run.hub()) as hub:
        return read_records(hub)


def audit(run: CrashRun) -> Ledger:
    return build_ledger(evidence_of(run))


@pytest.mark.parametrize("seed", seeds(8))
def test_d1_d7_cut_anywhere_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rl = {"filter_zero_advantage_groups": True}
    ledger = run_with_cuts(crash_run(tmp_path, seed, max_lag=16, finetune={"rl": rl}), monkeypatch, cuts=12)
    counts = ledger.counts()
    assert sum(counts.values()) == ledger.submitted
    assert ledger.lineage.last_step == STEPS and counts["trained"] >= STEPS * BATCH
    # A rollout starts at most ceil(16 / 8) + 1 versions before its batch, plus the versions that it spans.
    spans = max(sample.max_version - sample.min_version for sample in ledger.samples.values())
    assert ledger.max_lag_versions() <= 3 + spans


@pytest.mark.parametrize("seed", seeds(4))
def test_d8_max_lag_0_stays_on_policy_after_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ledger = run_with_cuts(crash_run(tmp_path, seed, max_lag=0), monkeypatch, cuts=8)
    assert ledger.lineage.last_step == STEPS
    assert ledger.max_lag_versions() == 0


@pytest.mark.parametrize("seed", seeds(4))
def test_d8_a_hard_bound_holds_after_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run = crash_run(tmp_path, seed, max_lag=None, finetune={"max_version_lag": 1})
    ledger = run_with_cuts(run, monkeypatch, cuts=8)
    assert ledger.lineage.last_step == STEPS
    assert ledger.max_lag_versions() <= 1


def test_d1_problems_keep_their_order_and_none_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that were running at a cut are run again at their place: long ones are not lost more often."""
    run = crash_run(tmp_path, 3, max_lag=16)
    run_with_cuts(run, monkeypatch, cuts=12)
    evidence = evidence_of(run)
    numbers = [int(group.id.partition("-")[2]) for group in evidence.groups]
    assert len(set(numbers)) == len(numbers)
    missing = set(range(max(numbers))) - set(numbers)
    assert len(missing) <= 4, "only what is running at the end, or failed as a whole, is not there"
