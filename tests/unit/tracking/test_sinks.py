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

from pipelinerl.records import MetricRecord
from pipelinerl.tracking.sinks import BackgroundSink, JsonlSink, SafeSink, redact


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
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(record(1))
    assert json.loads(path.read_text()) == {"time": 1.0, "step": 1, "source": "a", "a/x": 0.5}
    sink.finish({})
    JsonlSink(path)
    assert path.read_text() == ""


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


def test_a_background_sink_that_hangs_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    sink = BackgroundSink("W&B", lambda: ListSink(gate=gate), close_timeout_s=0.1)
    sink.log(record(0))
    with caplog.at_level(logging.WARNING):
        sink.finish({})
    assert "W&B did not finish within 0 s and is left alone" in caplog.text
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
