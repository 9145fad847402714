"""Recording metrics never ends a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord
from pipelinerl.streams.files import FileReader, FileWriter
from pipelinerl.streams.recorder import MetricRecorder


def test_records_carry_source_step_time_and_numbers(tmp_path: Path) -> None:
    writer: FileWriter[MetricRecord] = FileWriter(tmp_path, MetricRecord, 10**6, "never")
    recorder = MetricRecorder(writer, "finetune_0")
    recorder.log(3, {"finetune/loss": 0.25, "finetune/tokens": 7})
    recorder.close()
    [entry] = FileReader[MetricRecord](tmp_path, MetricRecord).read(0)
    assert entry.record == MetricRecord(
        source="finetune_0",
        step=3,
        time=entry.record.time,
        values={"finetune/loss": 0.25, "finetune/tokens": 7.0},
    )


def test_numbers_that_are_not_finite_are_left_out_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer: FileWriter[MetricRecord] = FileWriter(tmp_path, MetricRecord, 10**6, "never")
    recorder = MetricRecorder(writer, "a")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            recorder.log(step, {"a/nan": float("nan"), "a/good": 1.0, "a/inf": float("inf")})
    assert [entry.record.values for entry in FileReader[MetricRecord](tmp_path, MetricRecord).read(0)] == [
        {"a/good": 1.0}
    ] * 2
    assert [record.getMessage().split(" at ")[0] for record in caplog.records] == ["a/nan is nan", "a/inf is inf"]


class FullDisk:
    def write(self, record: MetricRecord) -> int:
        raise StreamError("no space left")

    def flush(self) -> None: ...

    def close(self) -> None:
        raise StreamError("no space left")


def test_o1_a_full_disk_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = MetricRecorder(FullDisk(), "a")
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            recorder.log(step, {"a/x": 1.0})
        recorder.close()
    assert len(caplog.records) == 1
