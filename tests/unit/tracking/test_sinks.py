"""Sinks never end a run, and nothing secret leaves the machine."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.secrets import redact
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir
from pipelinerl.tracking.rollout_table import RolloutTable
from pipelinerl.tracking.sinks import (
    BackgroundSink,
    JsonlSink,
    OnwardValues,
    SafeSink,
    SinkInputs,
    make_sinks,
    told_steps,
)


def record(n: int) -> MetricRecord:
    return MetricRecord(source="a", step=n, time=float(n), values={"a/x": 0.5})


class ListSink:
    def __init__(self, fail_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.summary: Mapping[str, Any] | None = None
        self.fail_at, self.gate = fail_at, gate

    def log(self, record: MetricRecord) -> None:
        if self.gate is not None:
            self.gate.wait(600)
        if record.step == self.fail_at:
            raise ConnectionError("unreachable")
        self.steps.append(record.step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def unreachable() -> ListSink:
    raise ConnectionError("unreachable")


def test_jsonl_rows_are_flat_and_visible_at_once(tmp_path: Path) -> None:
    inputs = SinkInputs(RunConfig(output_dir="x"), RunDir(tmp_path / "run"), 0.0)
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(inputs)
    sink.log(record(1))
    assert json.loads(path.read_text()) == {"time": 1.0, "step": 1, "source": "a", "a/x": 0.5}
    sink.finish({})
    JsonlSink(inputs)
    assert path.read_text() == ""


SINK_OF_A_USER = """
import json

class MySink:
    def __init__(self, inputs):
        self.inputs, self.rows = inputs, []

    def log(self, record):
        self.rows.append([record.time < self.inputs.since, record.step, record.source, record.values])

    def log_rollouts(self, table):
        self.rows.append([table.dataset, table.version, table.columns, table.rows])

    def finish(self, summary):
        (self.inputs.run_dir.root / "mine.json").write_text(json.dumps([self.inputs.config.seed, self.rows, summary]))

class OnlyNumbers:
    def __init__(self, inputs): ...
    def log(self, record): ...
    def finish(self, summary): ...

class OfAnotherVersion(MySink):
    api_version = 99
"""


def test_a_sink_of_the_user_gets_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sink_of_a_user.py").write_text(SINK_OF_A_USER)
    monkeypatch.syspath_prepend(tmp_path)
    names = [f"sink_of_a_user.{name}" for name in ("MySink", "OnlyNumbers", "OfAnotherVersion", "Missing")]
    config = RunConfig.model_validate(
        {"output_dir": "x", "seed": 7, "wandb": {"mode": "disabled"}, "tracking": {"sinks": names}}
    )
    sinks = make_sinks(SinkInputs(config, RunDir(tmp_path), since=2.0))
    with caplog.at_level(logging.WARNING):
        for sink in sinks:
            for n in (1, 2):
                sink.log(record(n))
            sink.log_rollouts(RolloutTable("test", 2, ("answer",), [("4",)]))
            sink.finish({"status": "completed", "steps": 2})
    rows = [[True, 1, "a", {"a/x": 0.5}], [False, 2, "a", {"a/x": 0.5}], ["test", 2, ["answer"], [["4"]]]]
    assert json.loads((tmp_path / "mine.json").read_text()) == [7, rows, {"status": "completed", "steps": 2}]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(caplog.records) == 2 and all(name in caplog.text for name in names[2:])


def onward(root: Path, since: float, *records: MetricRecord) -> list[tuple[int, dict[str, float]]]:
    inputs = SinkInputs(RunConfig(output_dir="x"), RunDir(root), since, told_steps(RunDir(root)))
    values = OnwardValues(inputs)
    return [(each.step, taken) for each in records if (taken := values.take(each))]


def test_a_tracker_gets_what_was_recorded_after_its_launcher_was_gone(tmp_path: Path) -> None:
    """A launcher was killed after it told of step 2; its trainer took step 3 before it noticed, and saved step 1."""
    first = [record(n) for n in (1, 2, 3)]
    assert [step for step, _ in onward(tmp_path, 0.0, *first)] == [1, 2, 3]
    sink = JsonlSink(SinkInputs(RunConfig(output_dir="x"), RunDir(tmp_path), 0.0))
    for each in first[:2]:
        sink.log(each)
    with RunDir(tmp_path).metrics_file.open("ab") as file:
        file.write(b'{"time": 3.0, "st')
    again = [MetricRecord(source="a", step=n, time=10.0 + n, values={"a/x": 1.0}) for n in (2, 3, 4)]
    expected = [(2, {"a/x": 0.5}), (3, {"a/x": 0.5}), (4, {"a/x": 1.0})]
    assert onward(tmp_path, 10.0, *first, *again) == expected, "step 2 may have been lost on its way"


def test_what_was_told_is_known_after_starts_that_were_killed_while_they_wrote_the_file_anew(tmp_path: Path) -> None:
    files, config = RunDir(tmp_path), RunConfig(output_dir="x", wandb={"mode": "disabled"})
    assert told_steps(files) is None
    for lines in (100, 30, 0, 7):
        (sink,) = make_sinks(SinkInputs(config, files, since=0.0))
        for n in range(lines):
            sink.log(record(n))
        assert len(files.metrics_file.read_text().splitlines()) == lines
        assert told_steps(files) == {"a/x": 99}
    files.told_file.write_text('{"a/x')
    assert told_steps(files) == {"a/x": 6}


def test_o1_a_sink_that_raises_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    inner = ListSink(fail_at=2)
    sink = SafeSink("W&B", lambda: inner)
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            sink.log(record(n))
        sink.finish({})
    assert inner.steps == [0, 1] and inner.summary is None and not sink.works
    assert len(caplog.records) == 1 and "unreachable" in caplog.records[0].getMessage()


def test_o1_a_sink_that_cannot_start_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for sink in (SafeSink("x", unreachable), BackgroundSink("y", unreachable)):
            sink.log(record(0))
            sink.finish({})
    assert len(caplog.records) == 2


def test_a_background_sink_hands_over_everything_in_order() -> None:
    inner = ListSink()
    sink = BackgroundSink("x", lambda: inner)
    for n in range(500):
        sink.log(record(n))
    sink.finish({"status": "completed"})
    assert inner.steps == list(range(500))
    assert inner.summary == {"status": "completed"}


def test_a_background_sink_drops_the_oldest_and_never_blocks() -> None:
    gate = threading.Event()
    inner = ListSink(gate=gate)
    sink = BackgroundSink("x", lambda: inner, queue_records=3)
    sink.log(record(0))
    start = time.monotonic()
    for n in range(1, 100):
        sink.log(record(n))
    assert time.monotonic() - start < 60
    gate.set()
    sink.finish({})
    assert inner.steps[-3:] == [97, 98, 99] and len(inner.steps) <= 5


def test_a_background_sink_that_hangs_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.tracking.sinks.CLOSE_TIMEOUT_S", 0.1)
    gate = threading.Event()
    sink = BackgroundSink("W&B", lambda: ListSink(gate=gate))
    sink.log(record(0))
    with caplog.at_level(logging.WARNING):
        sink.finish({})
    assert len(caplog.records) == 1 and "W&B" in caplog.text
    gate.set()


def test_o5_secrets_are_hidden() -> None:
    config = {
        "wandb": {"api_key": "abc", "tags": ["a"]},
        "streams": {"url": "redis://user:pass@host:1/0"},
        "environment": [{"auth-token": "t", "max_tokens": 5, "PASSWORD": "p", "token": None}],
    }
    assert redact(config) == {
        "wandb": {"api_key": "***", "tags": ["a"]},
        "streams": {"url": "redis://***@host:1/0"},
        "environment": [{"auth-token": "***", "max_tokens": 5, "PASSWORD": "***", "token": None}],
    }
