"""TensorBoard event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from fakes.short_sample import evaluation_result

from pipelinerl.config import RunConfig
from pipelinerl.records import EvaluationResult, MetricRecord, TrainerMessage, WeightUpdateSuccess
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tracking.collector import Collector
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.world import Job, WorldMap

tensorboard_sink = pytest.importorskip("pipelinerl.tracking.tensorboard_sink", reason="needs the extra tensorboard")

START = 100.0  # of the launcher that is writing; what is older was recorded before a resume
Points = list[tuple[int, float]]


def single(value: float) -> float:
    """TensorBoard keeps scalars in single precision."""
    return struct.unpack("f", struct.pack("f", value))[0]


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(folder: Path, tag: str) -> Points:
    return [(point.step, point.value) for point in read(folder).Scalars(tag)]


def text(folder: Path, tag: str) -> str:
    return read(folder).Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def row(step: int, value: float, time: float, source: str = "finetune_0", tag: str = "finetune/loss") -> MetricRecord:
    return MetricRecord(source=source, step=step, time=time, values={tag: value})


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", "wandb": {"mode": "disabled"}, **changes})


def sink(folder: Path, since: float = 0.0, records: Iterable[MetricRecord] = (), told: int | None = None) -> Any:
    steps = None if told is None else {"finetune/loss": told}
    made = tensorboard_sink.TensorBoardSink(SinkInputs(config(), RunDir(folder), since, steps))
    for record in records:
        made.log(record)
    return made


def test_values_steps_and_times_are_there_at_once(tmp_path: Path) -> None:
    made = sink(tmp_path / "a" / "b")
    for step in range(1, 4):
        values = {"finetune/loss": step / 10, "finetune/tokens": 1000.0 * step}
        made.log(MetricRecord(source="finetune_0", step=step, time=50.0 + step, values=values))
    assert points(tmp_path / "a" / "b", "finetune/loss") == [(step, single(step / 10)) for step in (1, 2, 3)]
    assert points(tmp_path / "a" / "b", "finetune/tokens") == [(1, 1000.0), (2, 2000.0), (3, 3000.0)]
    assert [point.wall_time for point in read(tmp_path / "a" / "b").Scalars("finetune/loss")] == [51.0, 52.0, 53.0]
    made.finish({"status": "completed", "steps": 3, "reason": None})
    assert "status: completed" in text(tmp_path / "a" / "b", "run/summary")


def test_o5_the_configuration_is_text_without_secrets(tmp_path: Path) -> None:
    secrets = {"api_key": "key-of-mine", "endpoint": "https://me:word-of-mine@host/v1", "max_tokens": 5}
    made = tensorboard_sink.TensorBoardSink(SinkInputs(config(custom=secrets), RunDir(tmp_path), 0.0))
    made.finish({"reason": "redis://u:word-of-mine@h:1 is gone"})
    shown = text(tmp_path, "run/config")
    for part in ("    seed: 42", "  api_key: '***'", "https://***@host/v1", "  max_tokens: 5"):
        assert part in shown
    assert "redis://***@h:1 is gone" in text(tmp_path, "run/summary")
    for file in (tmp_path / "tensorboard").iterdir():
        assert b"of-mine" not in file.read_bytes()


def test_a_resume_adds_what_is_new_and_steps_never_go_back(tmp_path: Path) -> None:
    """Killed at step 5 with a checkpoint of step 3: steps 4 and 5 keep their first values, as in W&B."""
    first = [row(step, step / 4, float(step)) for step in range(1, 6)]
    others = [row(step, 1.0, float(step), "evaluation", "evaluation/test/success_rate") for step in (0, 4)]
    sink(tmp_path, 0.0, [*first, *others])  # killed: nobody calls finish
    resumed = sink(tmp_path, START, first, told=5)
    for step in (4, 5, 6):
        resumed.log(row(step, 9.0, START + step))
    assert sorted(set(points(tmp_path, "finetune/loss"))) == [*((step, step / 4) for step in range(1, 6)), (6, 9.0)]
    assert points(tmp_path, "evaluation/test/success_rate") == [(0, 1.0), (4, 1.0)]


def test_event_files_that_are_asked_for_at_a_resume_have_the_whole_history(tmp_path: Path) -> None:
    sink(tmp_path, START, [row(step, step / 4, float(step)) for step in range(1, 4)], told=3)
    assert points(tmp_path, "finetune/loss") == [(step, step / 4) for step in range(1, 4)]


def play(tmp_path: Path) -> None:
    """One run with an evaluation, a weight update and a step, from its streams to its sinks."""
    job = Job("finetune", "finetune_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    actor = Job("actor", "actor_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    world = WorldMap([actor, job], "cpu", 1, "127.0.0.1", 1)
    settings = config(tensorboard={"enabled": True})
    hub = StreamHub(settings.streams, RunDir(tmp_path), "r")
    collector = Collector(hub, world, RunDir(tmp_path), settings)
    collector.start()
    updates = hub.writer("trainer", "finetune_0", TrainerMessage)
    numbers = hub.writer("metrics", "finetune_0", MetricRecord)
    results = hub.writer("evaluation", "actor_0", EvaluationResult)
    updates.write(WeightUpdateSuccess(version=7, time=2e9, seconds={"total": 0.5}, num_servers=1))
    numbers.write(row(7, 0.125, 2e9))
    results.write(evaluation_result(5, 0.25, metrics={"turns": 3.5}, time=2e9))
    for writer in (updates, numbers, results):
        writer.close()
    assert collector.write_summary("completed", None)["weight_updates"] == 1
    collector.raise_if_failed()


def test_from_streams_to_event_files(tmp_path: Path) -> None:
    play(tmp_path)
    folder = tmp_path
    assert points(folder, "finetune/loss") == [(7, 0.125)]
    assert points(folder, "weight_update/total_s") == [(7, 0.5)]
    assert points(folder, "evaluation/test/turns") == [(5, 3.5)]  # by the version that it was due at
    assert text(folder, "run/config").startswith("    output_dir: x\n")
    assert "weight_updates: 1" in text(folder, "run/summary")


def _a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").write_text("")


def _full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_full(folder: Path) -> BinaryIO:
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(tensorboard_sink, "open_events", open_full)


@pytest.mark.parametrize(("damage", "words"), [(_a_file, "File exists"), (_full_disk, "No space left on device")])
def test_o1_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path, pytest.MonkeyPatch], None],
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        damage(tmp_path, monkeypatch)
        play(tmp_path)
    warnings = [record.getMessage() for record in caplog.records if "TensorBoard" in record.getMessage()]
    assert len(warnings) == 1 and words in warnings[0]
