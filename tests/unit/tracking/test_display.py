"""What the terminal and the plot show."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from fakes.short_sample import evaluation_result, step_done

from pipelinerl.records import MetricRecord, WeightUpdateSuccess
from pipelinerl.tracking import display as display_module
from pipelinerl.tracking.display import (
    LiveDisplay,
    PlainDisplay,
    evaluation_line,
    progress_line,
    table_rows,
)
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.summary import LearningCurve, plot_learning_curve

EVALUATION = evaluation_result(
    0, 0.375, dataset_name="guessing_test", num_rollouts=512, num_failed=2, mean_reward=0.25, seconds=12.0, time=50.0
)
STEP = MetricRecord(source="finetune_0", step=1, time=60.0, values={"finetune/reward_mean": 0.5})


def running() -> RunState:
    state = RunState()
    state.fold_trainer(WeightUpdateSuccess(version=0, time=40.0, seconds={"total": 0.3}, num_servers=2))
    state.fold_evaluation(EVALUATION)
    values = {
        "actor/reward_mean": 0.5,
        "actor/success_rate": 0.625,
        "actor/output_tokens_per_s": 3100.4,
        "actor/rollouts_per_s": 12.34,
        "actor/server_busy_0": 4.0,
        "actor/server_busy_1": 7.0,
    }
    state.fold_metrics(MetricRecord(source="actor_0", step=1, time=60.0, values=values))
    trained = {"lag_mean_versions": 1.25, "lag_max_versions": 3.0, "ess": 0.93, "ess_after_clamp": 0.97, "loss": -0.01}
    state.fold_metrics(
        MetricRecord(source="finetune_0", step=1, time=60.0, values={f"finetune/{k}": v for k, v in trained.items()})
    )
    state.fold_trainer(step_done(1, 175.0))
    return state


def test_rows_of_the_table() -> None:
    rows = dict(table_rows(running(), max_steps=40))
    assert rows["step"].startswith("1/40 ") and "2:05" in rows["step"]
    assert (rows["reward, training"], rows["success, training"]) == ("0.500", "0.625")
    assert (rows["lag (versions)"], rows["servers"]) == ("mean 1.25, max 3", "0: 4 running, 1: 7 running")
    for row, numbers in (
        ("sampling", ("3100", "12.3")),
        ("ESS", ("0.930", "0.970")),
        ("success, held out", ("0.375",)),
    ):
        assert all(number in rows[row] for number in numbers)


def test_rows_of_a_run_that_has_not_begun() -> None:
    rows = dict(table_rows(RunState(), max_steps=None))
    assert rows["step"] == "0   (0:00 of training)"
    assert rows["servers"] == rows["samples"] == rows["last weight update"] == rows["success, held out"] == "-"


def test_the_plain_line_is_about_the_step_of_its_record() -> None:
    state = running()
    for step, reward in ((2, 0.25), (3, 0.75)):  # the preprocessor is a batch ahead of the trainer
        values = {"preprocessor/reward_mean": reward, "preprocessor/success_rate": reward}
        state.fold_metrics(MetricRecord(source="preprocessor_0", step=step, time=70.0, values=values))
    state.fold_trainer(step_done(3, 176.0))
    trained = {"finetune/reward_mean": 0.3, "finetune/grad_norm": 0.125}
    record = MetricRecord(source="finetune_0", step=2, time=71.0, values=trained)
    state.fold_metrics(record)
    line = progress_line(state, None, record)
    # Of all rollouts of the batch, also those whose samples a filter left out; the table and the plot say the same.
    assert " | ".join(line.split(" | ")[:4]) == "step 2 | - s/step | reward 0.250 | success 0.250"
    rows = dict(table_rows(state, None))
    assert (rows["reward, training"], rows["success, training"]) == ("0.750", "0.750")
    values = {"preprocessor/reward_mean": 0.9, "preprocessor/success_rate": 0.9}
    state.fold_metrics(MetricRecord(source="preprocessor_0", step=4, time=72.0, values=values))
    assert dict(table_rows(state, None))["reward, training"] == "0.750", "step 4 is not trained yet"
    # Its metrics may come before the trainer's word that it is.
    line = progress_line(state, None, MetricRecord(source="finetune_0", step=4, time=73.0, values=trained))
    assert "step 4 | - s/step | reward 0.900 | success 0.900 | " in line


def test_a_line_says_what_is_left_and_who_waits() -> None:
    """The median of the last ten steps of 2 s, and one of 30 s, is 2 s; 40 - 11 steps are left."""
    state = running()
    for step in range(1, 12):
        numbers = {"finetune/step_s": 30.0 if step == 5 else 2.0, "finetune/wait_data_s": 0.25}
        record = MetricRecord(source="finetune_0", step=step, time=60.0 + step, values=numbers)
        state.fold_metrics(record)
        state.fold_trainer(step_done(step, 60.0 + step))
    more = {
        "actor/server_idle_s_0": 1.0,
        "actor/server_idle_s_1": 0.5,
        "actor/output_tokens_per_rollout": 210.4,
        "preprocessor/cut_fraction": 0.125,
        "finetune/gpu_memory_peak_gib": 20.04,
    }
    state.fold_metrics(MetricRecord(source="actor_0", step=11, time=80.0, values=more))
    parts = progress_line(state, 40, record).split(" | ")
    assert parts[:3] == ["step 11/40", "2.00 s/step", "0:58 left"]
    assert parts[5] == "210 tokens, 12% cut" and parts[-1] == "20.0 GiB"
    assert parts[8] == "waits 0.2 s, servers 0.8 s"
    rows = dict(table_rows(state, 40))
    assert rows["pace"] == "2.00 s/step, 0:58 left" and rows["answers"] == "210 tokens, 12% cut off"


def test_notices_are_lines_and_stand_above_the_table() -> None:
    stream, table = io.StringIO(), io.StringIO()
    PlainDisplay(stream, 2).notice("note: look [here]")
    assert stream.getvalue() == "note: look [here]\n"
    display = LiveDisplay(table, "quickstart", 40)
    display.start(lambda read: read(running()))
    display.notice("note: look [here]")
    display.stop()
    display.stop()
    assert all(part in table.getvalue() for part in ("note: look [here]", "3100 tokens/s", "quickstart"))


def test_plain_lines_come_at_most_once_a_second_but_for_evaluations_and_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(display_module, "monotonic", iter((0.0, 0.5, 0.9, 1.0, 1.5)).__next__)
    stream = io.StringIO()
    display = PlainDisplay(stream, 2)
    for step in (1, 1, 1, 1, 2):
        display.step_recorded(running(), msgspec.structs.replace(STEP, step=step))
    display.evaluated(running(), EVALUATION)
    *steps, evaluation = stream.getvalue().splitlines()
    assert [line.partition(" |")[0] for line in steps] == ["step 1/2", "step 1/2", "step 2/2"]
    assert all(part in evaluation for part in ("guessing_test", "0.375", "0.250", "512 rollouts", "2 failed", "12.0 s"))


def test_an_evaluation_that_failed_altogether_is_said_and_shown_nowhere_as_a_value(tmp_path: Path) -> None:
    failed = msgspec.structs.replace(
        EVALUATION, due_version=8, num_failed=512, success_rate=None, mean_reward=None, metrics={}
    )
    line = evaluation_line(failed)
    assert "guessing_test" in line and "512" in line and "None" not in line
    state = running()
    state.fold_evaluation(failed)
    assert ("success, held out", "0.375 at version 0") in [(name, value) for name, value in table_rows(state, 40)]
    state.fold_evaluation(msgspec.structs.replace(failed, is_final=True))
    assert state.held_out_success("after") is None
    plot_learning_curve(LearningCurve.of(state), tmp_path / "curve.png", "run")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_the_plot_is_a_picture_also_of_an_empty_run(tmp_path: Path) -> None:
    for name, state in (("empty", RunState()), ("running", running())):
        plot_learning_curve(LearningCurve.of(state), tmp_path / f"{name}.png", "title")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
