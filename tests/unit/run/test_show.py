"""What the launcher prints: the plan, and the last words of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.run.processes import Outcome
from pipelinerl.run.show import print_plan, print_result
from pipelinerl.rundir.layout import RunDir, newest_training_state
from pipelinerl.world import Cluster, ClusterNode, build_world_map

DONE = {"steps": 12, "success_before": 0.25, "success_after": 0.5, "samples_trained": 96}
BEST = {"version": 50, "metric": "success_rate", "value": 0.61, "min_version": 50, "max_version": 53}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.best_model.mkdir(parents=True)
    for file in (found.summary_file, found.learning_curve_file):
        file.write_text("")
    return found


def test_a_complete_run(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Outcome("completed", None, 0), {**DONE, "best_model": BEST}, run_dir)
    out, err = capsys.readouterr()
    assert err == "" and str(run_dir.learning_curve_file) in out and str(run_dir.best_model) in out
    assert all(word in out for word in ("12", "0.250", "version 50", "success_rate 0.61", "53"))


def test_a_run_that_failed_before_its_first_step_is_its_reason(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.best_model.rmdir()
    print_result(Outcome("failed", "actor_0 died", 1), {"steps": 0, "samples_trained": 0, "seconds": 0.0}, run_dir)
    out, err = capsys.readouterr()
    assert out == f"summary: {run_dir.summary_file}\n" and "actor_0 died" in err


@pytest.mark.parametrize(("states", "words"), [((), "first step"), ((8, 12), "step 12")])
def test_an_interrupted_run_says_where_it_continues(
    states: tuple[int, ...], words: str, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in states:
        run_dir.training_state(step).mkdir(parents=True)
    assert newest_training_state(run_dir) == max(states, default=None)
    print_result(Outcome("interrupted", "stopped by SIGINT", 130), DONE, run_dir)
    err = capsys.readouterr().err
    assert "stopped by SIGINT" in err and words in err


COLOCATED = {"schedule": "conventional", "world": {"placement": "colocated"}}


@pytest.mark.parametrize(
    ("gpus", "config", "words"),
    [
        (0, {}, ("pipeline", "gloo")),
        (2, {**COLOCATED, "steps_per_generation": 2}, ("2 steps per generation", "ipc, nccl", "level auto")),
        (0, COLOCATED, ("1 steps", "gloo", "pause")),
    ],
)
def test_the_plan_says_who_waits_for_whom(
    gpus: int, config: dict[str, Any], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunConfig(output_dir="x", **config)
    cluster = Cluster((ClusterNode("127.0.0.1", tuple(map(str, range(gpus))), 2),))
    print_plan(run, build_world_map(run, cluster), [])
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
