"""The last words of a run: what a reader needs first, and nothing that is empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.run.result_text import print_result
from pipelinerl.run.supervisor import Outcome
from pipelinerl.rundir.layout import RunDir, newest_training_state

DONE = {"steps": 12, "success_before": 0.25, "success_after": 0.5, "samples_trained": 96}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    for file in (found.summary_file, found.learning_curve_file):
        file.write_text("")
    return found


def test_a_complete_run(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Outcome("completed", None, 0), DONE, run_dir)
    out, err = capsys.readouterr()
    assert "optimizer steps" in out and "learning curve: " in out and out.endswith("training is complete\n")
    assert err == ""


@pytest.mark.parametrize(("last", "span"), [(50, ""), (53, " measured over versions 50 to 53")])
def test_the_best_model_is_named_with_what_was_measured(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], last: int, span: str
) -> None:
    run_dir.best_model.mkdir(parents=True)
    best = {"version": 50, "metric": "success_rate", "value": 0.61, "min_version": 50, "max_version": last}
    print_result(Outcome("completed", None, 0), {**DONE, "best_model": best}, run_dir)
    assert f"best model (version 50, success_rate 0.61{span}): {run_dir.best_model}\n" in capsys.readouterr().out


def test_a_run_that_failed_before_its_first_step_is_its_reason(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(Outcome("failed", "actor_0 died", 1), {"steps": 0, "samples_trained": 0, "seconds": 0.0}, run_dir)
    out, err = capsys.readouterr()
    assert out == f"summary: {run_dir.summary_file}\n"
    assert err == "error: the run failed: actor_0 died\n"


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((), "starts again at the first step"),
        ((8, 12), "The same command, without force_restart, goes on behind step 12"),
    ],
)
def test_an_interrupted_run_says_how_to_go_on(
    states: tuple[int, ...], words: str, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in states:
        run_dir.training_state(step).mkdir(parents=True)
    assert newest_training_state(run_dir) == max(states, default=None)
    print_result(Outcome("interrupted", "stopped by SIGINT", 130), DONE, run_dir)
    err = capsys.readouterr().err
    assert err.startswith("the run was interrupted: stopped by SIGINT\n") and words in err
