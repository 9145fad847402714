"""The fold of a run's streams and its summary, with values worked out by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fakes.short_sample import evaluation_result, fate_record, step_done

from pipelinerl.records import (
    Fate,
    FateRecord,
    MetricRecord,
    TrainingDone,
    WeightUpdateSuccess,
    record_time,
)
from pipelinerl.records.lineage import Lineage
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.summary import build_summary, write_json


def update(version: int, time: float, total: float, probe: float | None = None, inc: int = 0) -> WeightUpdateSuccess:
    return WeightUpdateSuccess(
        version=version, time=time, seconds={"total": total}, num_servers=1, probe_abs_diff=probe, incarnation=inc
    )


def fate(kind: Fate, count: int, version: int = 1, tokens: int = 0, rollouts: int = 0, inc: int = 0) -> FateRecord:
    names = [f"g/r{n}/s0" for n in range(count)]
    return fate_record(kind, *names, version=version, output_tokens=tokens, num_rollouts=rollouts, incarnation=inc)


def metrics(n: int, **values: float) -> MetricRecord:
    return MetricRecord(
        source="finetune_0", step=n, time=0.0, values={f"finetune/{name}": value for name, value in values.items()}
    )


@pytest.fixture
def finished() -> RunState:
    state = RunState()
    state.fold_trainer(update(0, time=100.0, total=0.5, probe=1e-6))
    state.fold_evaluation(evaluation_result(0, 0.3, num_rollouts=300, time=110.0, dataset_name="a"))
    state.fold_evaluation(evaluation_result(0, 0.5, num_rollouts=100, time=109.0, dataset_name="b"))
    state.fold_trainer(update(1, time=119.0, total=0.2, probe=3e-6))
    state.fold_trainer(step_done(1, 120.0, 16))
    state.fold_trainer(update(2, time=129.0, total=0.3))
    state.fold_trainer(step_done(2, 130.0, 24))
    state.fold_trainer(TrainingDone(version=2, time=130.0, samples_processed=40))
    state.fold_evaluation(evaluation_result(2, 0.75, num_rollouts=300, is_final=True, time=140.0, dataset_name="a"))
    state.fold_evaluation(evaluation_result(2, 0.95, num_rollouts=100, is_final=True, time=141.0, dataset_name="b"))
    state.fold_metrics(metrics(1, lag_mean_versions=0.0, lag_max_versions=1.0, output_tokens=100.0))
    state.fold_metrics(metrics(2, lag_mean_versions=2.0, lag_max_versions=3.0, output_tokens=300.0))
    state.fold_metrics(metrics(1, multi_version_samples=2.0))
    state.fold_metrics(metrics(2, multi_version_samples=5.0))
    state.fold_fate(fate("trained", 16, version=1, tokens=100))
    state.fold_fate(fate("trained", 24, version=2, tokens=300))
    state.fold_fate(fate("filtered", 8, tokens=200))
    state.fold_fate(fate("failed", 0, rollouts=3))
    state.fold_fate(fate("unused", 2, rollouts=5))  # 2 of the 5 rollouts had ended, with a sample each
    return state


def test_summary_of_a_finished_run(finished: RunState) -> None:
    assert build_summary(finished, "completed", None) == {
        "status": "completed",
        "reason": None,
        "steps": 2,
        "samples_trained": 40,
        "weight_updates": 3,
        "success_before": pytest.approx(0.35),  # (90 + 50) / 400
        "success_after": pytest.approx(0.80),  # (225 + 95) / 400
        "seconds": 20.0,  # from the end of the evaluation at 110 to 130
        "samples_per_second": 2.0,
        "output_tokens_per_second": 30.0,  # 600 tokens, the filtered ones too
        "mean_lag_versions": pytest.approx(1.5),  # (0 * 100 + 2 * 300) / 400
        "max_lag_versions": 3,
        "multi_version_samples": 7,
        "stall_fraction": pytest.approx(0.025),  # 0.5 s of updates after the first, in 20 s
        "logprob_abs_diff_mean": pytest.approx(2e-6),
        "fates": {"trained": 40, "filtered": 8, "failed": 3, "unused": 5},
    }


def test_the_servers_stall_in_every_update_but_the_first(finished: RunState) -> None:
    assert finished.stall_seconds == pytest.approx(0.5)


def test_summary_of_a_run_that_never_started() -> None:
    summary = build_summary(RunState(), "failed", "actor_llm_0 died")
    assert summary["reason"] == "actor_llm_0 died"
    assert summary["success_before"] is summary["success_after"] is summary["logprob_abs_diff_mean"] is None
    assert [summary[key] for key in ("steps", "seconds", "samples_per_second", "stall_fraction")] == [0, 0, 0.0, 0.0]
    assert summary["fates"] == {}


def test_a_rolled_back_future_does_not_count() -> None:
    state = RunState()
    state.fold_trainer(update(0, time=0.0, total=0.1))
    for n in (1, 2, 3):
        state.fold_trainer(step_done(n, 10.0 * n, 8))
        state.fold_fate(fate("trained", 8, version=n))
    # Resumed from the checkpoint of step 1: steps 2 and 3 are done again, and 4.
    state.fold_trainer(update(1, time=100.0, total=9.0, inc=1))
    for n in (2, 3, 4):
        state.fold_trainer(step_done(n, 100.0 + 10.0 * n, 5, incarnation=1))
        state.fold_fate(fate("trained", 5, version=n, inc=1))
    assert state.steps == 4
    assert state.lineage.num_samples == 8 + 3 * 5
    assert state.fates == {"trained": 23}
    assert state.training_seconds == 30.0 + 40.0
    assert state.stall_seconds == 0.0


def test_a_resume_that_falls_short_of_the_old_end() -> None:
    lineage = Lineage()
    for n in range(1, 10):
        lineage.add_step(0, n, 1)
    lineage.add_step(2, 4, 1)
    assert (lineage.last_step, lineage.num_samples) == (4, 4)
    assert [lineage.survives(0, n) for n in (3, 4, 9)] == [True, False, False]
    assert lineage.survives(2, 4) and lineage.survives(3, 1)


def test_the_only_evaluation_of_a_run_without_steps_is_both() -> None:
    state = RunState()
    state.fold_evaluation(evaluation_result(0, 0.4, is_final=True))
    assert state.held_out_success("before") == state.held_out_success("after") == 0.4
    state.fold_evaluation(evaluation_result(0, 0.2))
    assert state.held_out_success("before") == 0.2


def test_write_json_leaves_no_draft(tmp_path: Path) -> None:
    write_json(tmp_path / "sub" / "summary.json", {"a": None, "b": [1]})
    assert json.loads((tmp_path / "sub" / "summary.json").read_text()) == {"a": None, "b": [1]}
    assert len(list((tmp_path / "sub").iterdir())) == 1


def test_what_the_trainer_does_around_an_update_is_no_stall() -> None:
    state = RunState()
    for version, seconds in enumerate(({"total": 9.0, "paused": 9.0}, {"total": 0.5, "paused": 0.2}, {"total": 0.3})):
        state.fold_trainer(
            WeightUpdateSuccess(version=version, time=float(version), seconds=seconds, num_servers=1, incarnation=0)
        )
    # The first one pauses servers that have nothing to do yet; records of earlier releases have no `paused`.
    assert state.stall_seconds == pytest.approx(0.5)


def test_x6_a_clock_that_is_set_by_two_hours_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState()
    state.fold_trainer(update(0, record_time(), 0.1))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    state.fold_trainer(step_done(1, record_time() + 3.0, 4))
    assert build_summary(state, "completed", None)["seconds"] == pytest.approx(3.0, abs=1.0)
