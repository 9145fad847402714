"""Metrics are combined by their declared reduction, and recording them never ends a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord
from pipelinerl.streams.files import FileReader, FileWriter
from pipelinerl.tracking.metrics import Metric, Reduction, plain_values, reduce_metrics
from pipelinerl.tracking.recorder import MetricRecorder


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", 4.0), ("sum", 12.0), ("max", 7.0), ("min", 2.0), ("last", 3.0)]
)
def test_three_parts_are_combined_by_their_reduction(reduction: Reduction, expected: float) -> None:
    parts = [{"x": Metric(value, reduction)} for value in (2.0, 7.0, 3.0)]
    assert plain_values(reduce_metrics(parts)) == {"x": expected}


def test_a_mean_is_weighted_and_does_not_depend_on_the_split() -> None:
    # (1 * 10 + 4 * 30 + 2 * 60) / 100
    one, two, three = ({"x": Metric(v, "mean", w)} for v, w in ((1.0, 10), (4.0, 30), (2.0, 60)))
    assert plain_values(reduce_metrics([one, two, three])) == {"x": pytest.approx(2.5)}
    assert plain_values(reduce_metrics([one, reduce_metrics([two, three])])) == {"x": pytest.approx(2.5)}
    assert reduce_metrics([{"x": Metric(5.0, "mean", 0)}] * 2)["x"].value == 0.0


def test_a_name_that_a_part_lacks_is_combined_over_the_others() -> None:
    combined = reduce_metrics([{"a": Metric(1.0)}, {"a": Metric(3.0), "b": Metric(9.0, "max")}])
    assert plain_values(combined) == {"a": 2.0, "b": 9.0}


def test_two_reductions_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="loss: one metric has two reductions: mean and sum"):
        reduce_metrics([{"loss": Metric(1.0, "mean")}, {"loss": Metric(1.0, "sum")}])


def test_records_carry_source_step_time_and_numbers(tmp_path: Path) -> None:
    writer: FileWriter[MetricRecord] = FileWriter(tmp_path, MetricRecord, 10**6, "never")
    recorder = MetricRecorder(writer, "finetune_0", clock=lambda: 12.5)
    recorder.log(3, {"finetune/loss": 0.25, "finetune/tokens": 7, "finetune/max": Metric(2.0, "max")})
    recorder.close()
    [entry] = FileReader[MetricRecord](tmp_path, MetricRecord).read(0)
    assert entry.record == MetricRecord(
        source="finetune_0",
        step=3,
        time=12.5,
        values={"finetune/loss": 0.25, "finetune/tokens": 7.0, "finetune/max": 2.0},
    )


def test_numbers_that_are_not_finite_are_left_out_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer: FileWriter[MetricRecord] = FileWriter(tmp_path, MetricRecord, 10**6, "never")
    recorder = MetricRecorder(writer, "a", clock=lambda: 0.0)
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
    assert recorder.lost_records == 5
    assert len(caplog.records) == 1
