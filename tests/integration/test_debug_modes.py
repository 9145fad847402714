"""Stages of the pipeline alone: on the streams of a run that is complete, and rollouts without a trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fakes.whole_run import WholeRun, make_whole_run

STEPS = 3


def other_dir(run: WholeRun, name: str) -> WholeRun:
    return dataclasses.replace(run, output_dir=run.output_dir.parent / name)


def complete(run: WholeRun, *overrides: str) -> dict[str, Any]:
    result = run.run(f"finetune.max_train_steps={STEPS}", *overrides, timeout_s=500)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.living_processes() == []
    assert run.summary["status"] == "completed"
    return run.summary


def jobs_of(run: WholeRun) -> set[str]:
    return {path.parent.name for path in run.output_dir.glob("*/command.sh")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    run = make_whole_run(tmp_path_factory.mktemp("recorded"))
    complete(run)
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_alone_comes_to_the_same_weights(recorded: WholeRun) -> None:
    from transformers import AutoModelForCausalLM

    files = {path: path.stat().st_mtime_ns for path in (recorded.output_dir / "streams").rglob("*.jsonl")}
    alone = other_dir(recorded, "finetune")
    summary = complete(alone, "debug.mode=finetune", f"debug.streams_from={recorded.output_dir}")
    assert jobs_of(alone) == {"finetune_0"}
    assert (summary["steps"], summary["weight_updates"]) == (STEPS, 0)
    whole, again = (
        AutoModelForCausalLM.from_pretrained(run.output_dir / "finetune" / "current").state_dict()
        for run in (recorded, alone)
    )
    assert all(whole[name].equal(again[name]) for name in whole)
    assert files == {path: path.stat().st_mtime_ns for path in (recorded.output_dir / "streams").rglob("*.jsonl")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_preprocessor_alone_makes_the_batches_again(recorded: WholeRun) -> None:
    alone = other_dir(recorded, "preprocessor")
    complete(alone, "debug.mode=preprocessor", f"debug.streams_from={recorded.output_dir}")
    assert jobs_of(alone) == {"preprocessor_0"}
    then, now = (
        {batch["step"]: batch["group_ids"] for batch in run.records("training_data")} for run in (recorded, alone)
    )
    assert all(now[step] == then[step] for step in range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollouts_without_a_trainer(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    complete(run, "debug.mode=actor")
    assert jobs_of(run) == {"actor_llm_0", "actor_0"}
    samples = [sample for group in run.records("actor") for sample in group["samples"]]
    assert len(samples) >= STEPS * 64
    assert {span[0] for sample in samples for span in sample["version_spans"]} == {0}
    assert len(run.records("evaluation")) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_open_loop_trains_and_the_servers_keep_their_first_weights(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    summary = complete(run, "debug.mode=open_loop")
    assert (summary["steps"], summary["weight_updates"]) == (STEPS, 1)
    samples = [sample for group in run.records("actor") for sample in group["samples"]]
    assert {span[0] for sample in samples for span in sample["version_spans"]} == {0}
    assert summary["success_after"] == pytest.approx(summary["success_before"], abs=0.2)
