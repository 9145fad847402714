"""The three schedules as whole runs: real server, real trainer, evaluations beside training, a restart in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.whole_run import WholeRun, make_whole_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN_LIMIT_S = 850
COMMON = (
    "finetune.max_train_steps=6",
    "finetune.gradient_accumulation_passes=32",
    "eval_every_n_versions=2",
    "actor.test_samples=16",
    "llm.parameters.max_tokens=32",
    "llm.parameters.min_tokens=32",
    "supervise.progress_timeout_s=400",
)


def finish(run: WholeRun, *overrides: str) -> None:
    result = run.run(*COMMON, *overrides, timeout_s=RUN_LIMIT_S)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.living_processes() == []


def samples_by_step(run: WholeRun) -> dict[int, list[dict[str, Any]]]:
    return {batch["step"]: batch["samples"] for batch in run.records("training_data")}


def published_samples(run: WholeRun) -> list[dict[str, Any]]:
    return [sample for group in run.records("actor") for sample in group["samples"]]


def versions(samples: list[dict[str, Any]]) -> set[int]:
    return {span[0] for sample in samples for span in sample["version_spans"]}


def sent_versions(run: WholeRun) -> list[int]:
    return [record["version"] for record in run.records("trainer") if record["type"] == "weight_update_success"]


def test_conventional_trains_rounds_of_one_version(tmp_path: Path) -> None:
    """Rounds of 3 steps; the run is interrupted in the middle of the second one and continued."""
    run = make_whole_run(tmp_path)
    rounds = ("schedule=conventional", "steps_per_generation=3", "max_lag=null")
    finish(run, *rounds, "finetune.interrupt_train_steps=4")
    first_steps = samples_by_step(run)
    assert [versions(first_steps[step]) for step in (1, 2, 3, 4)] == [{0}, {0}, {0}, {3}]
    finish(run, *rounds)
    assert run.summary["status"] == "completed" and run.summary["steps"] == 6
    for step, samples in samples_by_step(run).items():
        assert {len(sample["version_spans"]) for sample in samples} == {1}
        assert all(0 <= step - 1 - version <= 2 for version in versions(samples)), step
    # Version 4 is sent at the end of the first run and again at the start of the second.
    assert sent_versions(run) == [0, 3, 4, 4, 6]


def test_concurrent_never_changes_weights_in_a_sequence(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    finish(run, "schedule=concurrent", "max_lag=64", "finetune.interrupt_train_steps=3")
    finish(run, "schedule=concurrent", "max_lag=64")
    # The second start sends again what the first one ended with, before anything runs.
    assert sent_versions(run) == [0, 1, 2, 3, 3, 4, 5, 6]
    published = published_samples(run)
    assert {len(sample["version_spans"]) for sample in published} == {1}
    assert len(versions(published)) > 1
    drains = [record["version"] for record in run.records("turns")]
    assert sorted(drains) == sorted([*range(1, 7), *range(1, 7)]), "each update is asked for and answered once"


def test_pipeline_changes_weights_in_the_middle_of_sequences(tmp_path: Path) -> None:
    """Without a bound on the lag the server is never idle, so an update cannot but meet sequences."""
    run = make_whole_run(tmp_path)
    finish(run, "schedule=pipeline", "max_lag=null")
    assert sent_versions(run) == list(range(7))
    assert max(len(sample["version_spans"]) for sample in published_samples(run)) > 1
    assert run.records("turns") == []


def test_colocated_servers_and_trainer_take_turns(tmp_path: Path) -> None:
    """One step behind by choice: rounds of 2. On a CPU servers pause instead of sleeping; every turn is asked for."""
    run = make_whole_run(tmp_path)
    finish(run, "schedule=conventional", "steps_per_generation=2", "world.placement=colocated", "max_lag=null")
    assert sent_versions(run) == [0, 2, 4, 6]
    for step, samples in samples_by_step(run).items():
        assert versions(samples) == {(step - 1) // 2 * 2}, step
    asked = [record["version"] for record in run.records("turns")]
    assert sorted(asked) == [2, 2, 4, 4, 6, 6], "each turn is asked for and answered once"
    evaluations = run.records("evaluation")
    assert {record["due_version"] for record in evaluations} >= {0, 2, 4, 6}
    assert all(record["min_version"] == record["max_version"] for record in evaluations)
