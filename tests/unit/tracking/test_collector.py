"""The collector on real streams: from the roles' records to metrics.jsonl, summary and plot."""

from __future__ import annotations

import io
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fakes.ports import refused_port
from fakes.short_sample import evaluation_result, fate_record, step_done

from pipelinerl.config import RunConfig
from pipelinerl.errors import StreamError
from pipelinerl.records import (
    EvaluationResult,
    EvaluationRollout,
    FateRecord,
    MetricRecord,
    TrainerMessage,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.recorder import MetricRecorder
from pipelinerl.tracking.collector import Collector
from pipelinerl.tracking.display import PlainDisplay
from pipelinerl.tracking.health import newest_findings
from pipelinerl.tracking.sinks import SinkInputs, make_sinks
from pipelinerl.world import Job, WorldMap


def job(kind: str, idx: int = 0) -> Job:
    return Job(kind, f"{kind}_{idx}", idx, 0, 0, "127.0.0.1", [], None, None, None, 1)


JOBS = [job("actor_llm"), job("actor"), job("preprocessor"), job("finetune", 0), job("finetune", 1)]
WORLD = WorldMap(JOBS, "cpu", 1, "127.0.0.1", 1)


def evaluation(due: int, success: float, final: bool) -> EvaluationResult:
    return evaluation_result(due, success, is_final=final, metrics={"turns": 3.5}, time=11.0 + due)


class Run:
    """A run in `tmp_path`, with a collector and the writers that the roles would have."""

    def __init__(self, tmp_path: Path, **wandb: Any) -> None:
        self.dir = RunDir(tmp_path)
        self.hub = StreamHub(RunConfig(output_dir="x").streams, self.dir, "r")
        self.config = RunConfig(output_dir=str(tmp_path), wandb={"mode": "disabled", **wandb})
        self.screen = io.StringIO()
        self.collector = self.make_collector()

    def make_collector(self, incarnation: int = 0) -> Collector:
        display = PlainDisplay(self.screen, self.config.finetune.max_train_steps)
        return Collector(self.hub, WORLD, self.dir, self.config, display=display, incarnation=incarnation)

    def play(self) -> None:
        trainer = self.hub.writer("trainer", "finetune_0", TrainerMessage)
        results = self.hub.writer("evaluation", "actor_0", EvaluationResult)
        numbers = MetricRecorder(self.hub.writer("metrics", "finetune_0", MetricRecord), "finetune_0")
        fates = self.hub.writer("fates", "finetune_0", FateRecord)
        trainer.write(
            WeightUpdateSuccess(version=0, time=10.0, seconds={"total": 0.1}, num_servers=1, probe_abs_diff=1e-6)
        )
        results.write(evaluation(0, 0.25, False))
        trainer.write(WeightUpdateSuccess(version=1, time=14.0, seconds={"total": 0.2}, num_servers=1))
        fates.write(fate_record("trained", "a", "b", version=1))
        trainer.write(step_done(1, 15.0))
        numbers.log(1, {"finetune/loss": -0.5, "finetune/lag_max_versions": 1.0})
        trainer.write(TrainingDone(version=1, time=15.0, samples_processed=2))
        results.write(evaluation(1, 0.75, True))
        for writer in (trainer, results, numbers, fates):
            writer.close()


def test_from_streams_to_files(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.collector.start()
    run.play()
    summary = run.collector.write_summary("completed", None)
    run.collector.raise_if_failed()
    assert json.loads(run.dir.summary_file.read_text()) == summary
    assert {key: summary[key] for key in ("steps", "samples_trained", "weight_updates", "seconds", "fates")} == {
        "steps": 1,
        "samples_trained": 2,
        "weight_updates": 2,
        "seconds": 4.0,
        "fates": {"trained": 2},
    }
    assert (summary["success_before"], summary["success_after"]) == (0.25, 0.75)
    assert run.dir.learning_curve_file.exists()
    rows = [json.loads(line) for line in run.dir.metrics_file.read_text().splitlines()]
    assert len(rows) == 5  # two updates, two evaluations, one step
    assert {"finetune/loss": -0.5}.items() <= next(row for row in rows if row["source"] == "finetune_0").items()
    assert {row["evaluation/test/turns"] for row in rows if row["source"] == "evaluation"} == {3.5}
    shown = run.screen.getvalue()
    assert "step 1/1000" in shown
    assert "final evaluation on test: success 0.750" in shown


def test_the_curve_is_drawn_at_an_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.collector.start()
    run.hub.writer("evaluation", "actor_0", EvaluationResult).write(evaluation(0, 0.25, False))
    run.collector.stop()
    assert run.dir.learning_curve_file.read_bytes().startswith(b"\x89PNG")


def test_a_restarted_collector_comes_to_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.play()
    run.collector.start()
    first = run.collector.write_summary("interrupted", "signal")
    lines = sorted(run.dir.metrics_file.read_text().splitlines())
    again = run.make_collector()
    again.start()
    assert again.write_summary("completed", None) == {**first, "status": "completed", "reason": None}
    assert sorted(run.dir.metrics_file.read_text().splitlines()) == lines


def test_steps_without_anything_to_learn_are_said_and_not_again_after_a_resume(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.collector.start()
    numbers = MetricRecorder(run.hub.writer("metrics", "finetune_0", MetricRecord), "finetune_0")
    for step in range(1, 7):
        numbers.log(step, {"finetune/loss": 0.0, "finetune/zero_advantage_fraction": 1.0, "finetune/reward_mean": 0.0})
    numbers.close()
    run.collector.write_summary("interrupted", "signal")
    assert run.screen.getvalue().count("note: ") == 1 and "up to step 5" in run.screen.getvalue()
    (finding,) = newest_findings(run.dir.findings_file)
    assert (finding.name, finding.step) == ("groups_equal", 5)
    logged = [json.loads(line) for line in run.dir.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in logged if line.get("health/groups_equal") == 1.0] == [5]
    run.screen.truncate(0)
    again = run.make_collector(incarnation=1)
    again.start()
    again.write_summary("completed", None)
    assert "step" not in run.screen.getvalue()
    assert newest_findings(run.dir.findings_file) == [finding]


def test_a_run_that_ended_before_anything_still_gets_its_summary_and_is_not_drawn(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.collector.start()
    assert run.collector.write_summary("failed", "actor_0 died")["reason"] == "actor_0 died"
    assert json.loads(run.dir.summary_file.read_text())["status"] == "failed"
    assert not run.dir.learning_curve_file.exists()


def test_a_corrupt_stream_is_raised_and_the_rest_is_still_summed_up(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.play()
    shard = tmp_path / "streams/metrics/actor_0/0/00000000000000000000.jsonl"
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_bytes(b"garbage\n")
    run.collector.start()
    assert run.collector.write_summary("completed", None)["steps"] == 1
    with pytest.raises(StreamError, match="metrics/actor_0"):
        run.collector.raise_if_failed()


def test_o1_a_broken_terminal_and_a_full_disk_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.screen.close()
    run.dir.metrics_file.rename(tmp_path / "old")
    run.dir.summary_file.mkdir()
    run.dir.learning_curve_file.mkdir()
    run.collector.start()
    with caplog.at_level(logging.WARNING):
        run.play()
        assert run.collector.write_summary("completed", None)["steps"] == 1
    for part in ("display", "summary.json", "learning_curve.png"):
        assert sum(part in record.getMessage().partition(":")[0] for record in caplog.records) == 1


class FakeWandb(types.ModuleType):
    """The part of wandb that the sink uses."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.error = error
        self.base_url = ""
        self.calls: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.url = "https://wandb.example/p/runs/1"

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def setup(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(settings=types.SimpleNamespace(base_url=self.base_url))

    def init(self, **arguments: Any) -> FakeWandb:
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(values)

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def finish(self, exit_code: int) -> None:
        self.calls.append(exit_code)

    def teardown(self) -> None:
        self.calls.append("teardown")


def test_wandb_gets_config_numbers_and_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("pipelinerl.tracking.collector.time.time", lambda: 12.0)  # what came before is a resume
    run = Run(tmp_path, mode="offline", wandb_project_name="p", wandb_name="n")
    run.collector.start()
    run.play()
    run.collector.write_summary("completed", None)
    start, *rows, code, teardown = fake.calls
    assert (start["project"], start["name"], start["mode"], start["dir"]) == ("p", "n", "offline", str(tmp_path))
    assert start["config"]["finetune"]["max_train_steps"] == 1000
    assert {row["version"] for row in rows} == {1}
    assert (code, teardown) == (0, "teardown")
    assert fake.summary["run/steps"] == 1


@pytest.mark.parametrize("limit", [16, 0])
def test_wandb_gets_rollouts_of_each_evaluation(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = Run(tmp_path, mode="offline")
    run.config = RunConfig.model_validate(
        {**run.config.model_dump(), "tracking": {"rollouts_per_evaluation": limit}, "output_dir": str(tmp_path)}
    )
    run.collector = run.make_collector()
    run.collector.start()
    rollouts = run.hub.writer("evaluation_rollouts", "actor_0", EvaluationRollout)
    for version, is_final in ((0, False), (1, True)):
        place: dict[str, Any] = {"due_version": version, "is_final": is_final, "group_id": "e", "dataset_name": "test"}
        rollouts.write(EvaluationRollout(id="e/r0", problem_id="p", problem="{}", failure="timeout", **place))
    run.play()
    run.collector.write_summary("completed", None)
    tables = [call for call in fake.calls if "evaluation/test/rollouts" in (call if isinstance(call, dict) else {})]
    shown = [(each["version"], each["evaluation/test/rollouts"][0]["end"]) for each in tables]
    assert shown == ([(0, "failed"), (1, "failed")] if limit else [])


def test_o1_a_stream_of_rollouts_that_cannot_be_read_costs_the_tables_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = Run(tmp_path, mode="offline")
    shard = tmp_path / "streams/evaluation_rollouts/actor_0/0/00000000000000000000.jsonl"
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_bytes(b"garbage\n")
    run.collector.start()
    with caplog.at_level(logging.WARNING):
        run.play()
        assert run.collector.write_summary("completed", None)["steps"] == 1
    run.collector.raise_if_failed()
    assert len(caplog.records) == 1 and "tables of rollouts are off" in caplog.text


def test_o1_wandb_that_raises_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(TimeoutError("no answer from the server")))
    run = Run(tmp_path, mode="online")
    run.collector.start()
    with caplog.at_level(logging.WARNING):
        run.play()
        assert run.collector.write_summary("completed", None)["steps"] == 1
    assert len(caplog.records) == 1 and "TimeoutError: no answer from the server" in caplog.text
    said = capsys.readouterr().err
    assert said.count("TimeoutError: no answer from the server") == 1 and "wandb.mode=offline" in said


def test_o1_an_unreachable_wandb_is_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("pipelinerl.tracking.wandb_sink.getproxies", dict)
    with refused_port() as port, caplog.at_level(logging.WARNING):
        fake.base_url = f"http://127.0.0.1:{port}"
        run = Run(tmp_path, mode="online")
        run.collector.start()
        run.collector.write_summary("completed", None)
    assert fake.calls == ["teardown"]
    assert len(caplog.records) == 1 and "ConnectionRefusedError" in caplog.text


def test_disabled_wandb_is_never_imported(tmp_path: Path) -> None:
    config = RunConfig(output_dir=str(tmp_path), wandb={"mode": "disabled"})
    assert len(make_sinks(SinkInputs(config, RunDir(tmp_path), 0.0))) == 1
