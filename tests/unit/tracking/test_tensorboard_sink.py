"""TensorBoard event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.records import EvaluationResult, MetricRecord, TrainerMessage, WeightUpdateSuccess
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
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


def written(folder: Path, tag: str) -> list[int]:
    """The steps of a tag in all files of the folder as they lie there, whatever a reader makes of them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = (
        event
        for file in sorted((folder / "tensorboard").iterdir())
        for event in LegacyEventFileLoader(str(file)).Load()
    )
    return [event.step for event in events if any(value.tag == tag for value in event.summary.value)]


def num_files(folder: Path) -> tuple[int, int]:
    """Files with events, and empty ones."""
    sizes = [file.stat().st_size for file in (folder / "tensorboard").iterdir()]
    return len(sizes) - sizes.count(0), sizes.count(0)


def row(step: int, value: float, time: float, source: str = "finetune_0", tag: str = "finetune/loss") -> MetricRecord:
    return MetricRecord(source=source, step=step, time=time, values={tag: value})


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", "wandb": {"mode": "disabled"}, **changes})


def sink(folder: Path, since: float = 0.0, records: Iterable[MetricRecord] = ()) -> Any:
    made = tensorboard_sink.TensorBoardSink(SinkInputs(config(), RunDir(folder), since))
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
    assert num_files(tmp_path / "a" / "b") == (1, 0)


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


def test_what_is_not_made_again_stays(tmp_path: Path) -> None:
    """An early record at a low step voids nothing after it, and of one step each metric's newest value counts."""
    history = [row(step, step / 4, float(step)) for step in (0, 1, 2, 3)]
    history += [row(1, 9.0, 1.5, tag="finetune/other"), row(0, 7.0, 50.0), row(2, 8.0, 51.0)]
    resumed = sink(tmp_path, START, [*history, row(0, 6.0, START + 1)])
    assert points(tmp_path, "finetune/loss") == [(0, 6.0)]
    resumed.log(row(5, 5.0, START + 2))
    assert points(tmp_path, "finetune/loss") == [(0, 6.0), (1, 0.25), (2, 8.0), (3, 0.75), (5, 5.0)]
    assert points(tmp_path, "finetune/other") == [(1, 9.0)]


def test_a_resume_goes_on_without_a_step_twice(tmp_path: Path) -> None:
    """Killed at step 5 with a checkpoint of step 3, then killed at 6 with one of 4, then resumed."""
    first = [row(step, step / 10, float(step)) for step in (1, 2, 3, 4, 5)]
    second = [row(step, step / 10 + 1, 40.0 + step) for step in (4, 5, 6)]
    sink(tmp_path, 0.0, first)  # killed: nobody calls finish
    resumed = sink(tmp_path, 40.0, [*first, second[0]])
    assert written(tmp_path, "finetune/loss") == [1, 2, 3, 4]
    for record in second[1:]:
        resumed.log(record)
    last = sink(tmp_path, START, [*first, *second])
    assert set(written(tmp_path, "finetune/loss")) == {1, 2, 3, 4, 5, 6}  # of the older file: the curve stays in sight
    last.log(row(5, 2.5, START + 1))
    expected = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 1.4), (5, 2.5)]
    assert points(tmp_path, "finetune/loss") == [(step, single(value)) for step, value in expected]
    assert written(tmp_path, "finetune/loss") == [1, 2, 3, 4, 5]
    last.finish({"status": "interrupted", "steps": 5})
    assert written(tmp_path, "finetune/loss") == [1, 2, 3, 4, 5]  # 6 was rolled back
    assert num_files(tmp_path) == (1, 1)  # the first start's file is gone


def test_a_source_goes_on_where_it_was_and_others_go_back(tmp_path: Path) -> None:
    """Batches and evaluations that were made are not made again, however far the trainer goes back."""
    before = [
        *(row(step, 1.0, float(step)) for step in (1, 2, 3, 4)),
        *(row(step, 1.0, float(step), "preprocessor_0", "preprocessor/reward_mean") for step in (1, 2, 3, 4, 5, 6)),
        *(row(step, 1.0, float(step), "evaluation", "evaluation/test/success_rate") for step in (0, 4)),
        *(row(step, 1.0, float(step), "weight_update", "weight_update/total_s") for step in (0, 1, 2, 3, 4)),
    ]
    sink(tmp_path, 0.0, before)
    resumed = sink(tmp_path, START, before)
    assert points(tmp_path, "evaluation/test/success_rate") == [(0, 1.0), (4, 1.0)]  # before any other source continues
    resumed.log(row(2, 9.0, START + 1, "weight_update", "weight_update/total_s"))
    resumed.log(row(7, 9.0, START + 2, "preprocessor_0", "preprocessor/reward_mean"))
    assert num_files(tmp_path) == (2, 0)
    resumed.log(row(3, 9.0, START + 3))
    assert num_files(tmp_path) == (1, 1)
    assert points(tmp_path, "weight_update/total_s") == [(0, 1.0), (1, 1.0), (2, 9.0)]
    assert points(tmp_path, "preprocessor/reward_mean") == [*((step, 1.0) for step in range(1, 7)), (7, 9.0)]
    assert points(tmp_path, "finetune/loss") == [(1, 1.0), (2, 1.0), (3, 9.0)]
    assert written(tmp_path, "evaluation/test/success_rate") == [0, 4]


def test_a_folder_of_the_users_is_for_many_runs(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert tensorboard_sink.events_folder(config(), run_dir) == tmp_path / "run" / "tensorboard"
    write_identity(run_dir.identity_file, RunIdentity(run_id="run-1a2b", incarnation=0))
    shared = config(tensorboard={"folder": str(tmp_path / "all")})
    assert tensorboard_sink.events_folder(shared, run_dir) == tmp_path / "all" / "run-1a2b"


def play(tmp_path: Path, tensorboard: dict[str, Any]) -> None:
    """One run with an evaluation, a weight update and a step, from its streams to its sinks."""
    job = Job("finetune", "finetune_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    actor = Job("actor", "actor_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    world = WorldMap([actor, job], "cpu", 1, "127.0.0.1", 1)
    settings = config(tensorboard={"enabled": True, **tensorboard})
    hub = StreamHub(settings.streams, RunDir(tmp_path), "r")
    collector = Collector(hub, world, RunDir(tmp_path), settings)
    collector.start()
    updates = hub.writer("trainer", "finetune_0", TrainerMessage)
    numbers = hub.writer("metrics", "finetune_0", MetricRecord)
    results = hub.writer("evaluation", "actor_0", EvaluationResult)
    updates.write(WeightUpdateSuccess(version=7, time=2e9, seconds={"total": 0.5}, num_servers=1))
    numbers.write(row(7, 0.125, 2e9))
    result: dict[str, Any] = {
        **{"due_version": 5, "min_version": 6, "max_version": 7, "is_final": False, "dataset_name": "test"},
        **{"num_rollouts": 4, "num_failed": 0, "success_rate": 0.25, "mean_reward": 0.25, "seconds": 1.0, "time": 2e9},
    }
    results.write(EvaluationResult(metrics={"turns": 3.5}, **result))
    for writer in (updates, numbers, results):
        writer.close()
    assert collector.write_summary("completed", None)["weight_updates"] == 1
    collector.raise_if_failed()


def test_from_streams_to_event_files(tmp_path: Path) -> None:
    play(tmp_path, {})
    folder = tmp_path
    assert points(folder, "finetune/loss") == [(7, 0.125)]
    assert points(folder, "weight_update/total_s") == [(7, 0.5)]
    assert points(folder, "evaluation/test/turns") == [(5, 3.5)]  # by the version that it was due at
    assert text(folder, "run/config").startswith("    output_dir: x\n")
    assert "weight_updates: 1" in text(folder, "run/summary")


def _a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "tensorboard").write_text("")
    return {}


def _no_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"folder": str(tmp_path / "all")}


def _full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def open_full(folder: Path) -> BinaryIO:
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(tensorboard_sink, "open_events", open_full)
    return {}


@pytest.mark.parametrize(
    ("damage", "words"),
    [(_a_file, "File exists"), (_no_identity, "conf/run.json is missing"), (_full_disk, "No space left on device")],
)
def test_o1_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path, pytest.MonkeyPatch], dict[str, Any]],
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        play(tmp_path, damage(tmp_path, monkeypatch))
    warnings = [record.getMessage() for record in caplog.records if "TensorBoard" in record.getMessage()]
    assert len(warnings) == 1 and words in warnings[0]
