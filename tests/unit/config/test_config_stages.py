"""Stages alone: which jobs are planned, what their configuration says, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipelinerl.config import RunConfig, save_config
from pipelinerl.config.resources import STAGE_KINDS
from pipelinerl.errors import ConfigError
from pipelinerl.records import TrainingBatch
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import bounded_by_record, count_batches, recorded_streams
from pipelinerl.world import Cluster, ClusterNode, WorldMap, build_world_map


class Ports:
    def take(self, node_rank: int, preferred: int, key: str) -> int:
        return preferred


def config(mode: str, **sections: object) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", "debug": {"mode": mode}, **sections})


def planned(run_config: RunConfig, gpus: Sequence[str] = ()) -> list[str]:
    cluster = Cluster((ClusterNode("127.0.0.1", tuple(gpus), 4),))
    return [job.name for job in build_world_map(run_config.of_stage(), cluster, Ports()).jobs]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("", ["actor_llm_0", "verifier_0", "actor_0", "preprocessor_0", "finetune_0"]),
        ("open_loop", ["actor_llm_0", "verifier_0", "actor_0", "preprocessor_0", "finetune_0"]),
        ("actor", ["actor_llm_0", "verifier_0", "actor_0"]),
        ("preprocessor", ["preprocessor_0"]),
        ("finetune", ["finetune_0"]),
    ],
)
def test_only_the_jobs_of_the_stage_are_planned(mode: str, expected: list[str]) -> None:
    assert planned(config(mode, world={"verifier_replicas": 1})) == expected


def test_a_stage_gets_all_devices() -> None:
    ranks = planned(config("finetune"), gpus="01234567")
    assert ranks == [f"finetune_{index}" for index in range(8)]
    servers = planned(config("actor"), gpus="01234567")
    assert sum(name.startswith("actor_llm") for name in servers) == 8
    assert planned(config("preprocessor", world={"num_preprocessor_llms": 1, "preprocessor_fraction": 1}), "01") == [
        "preprocessor_llm_0",
        "preprocessor_0",
    ]


def test_no_stage_sends_weights_in_mid_run_and_a_whole_run_stays_as_it_is() -> None:
    whole = config("")
    assert whole.of_stage() is whole
    for mode in STAGE_KINDS:
        assert config(mode).of_stage().sends_weights is (mode == "")
    assert config("open_loop").of_stage().supervise.max_server_restarts == 0


def record_batches(root: Path, steps: int, backend: str = "files") -> Path:
    """The directory of another run with `steps` batches."""
    files = RunDir(root)
    recorded = RunConfig.model_validate({"output_dir": str(root), "streams": {"backend": backend}})
    save_config(recorded, files.config_file)
    write_identity(files.identity_file, RunIdentity(run_id="other", incarnation=0))
    files.world_file.write_text(WorldMap([], "cpu", 1, "127.0.0.1", 1).to_json())
    if backend == "files":
        hub = StreamHub(recorded.streams, files, "other")
        writer = hub.writer("training_data", "preprocessor_0", TrainingBatch)
        for step in range(1, steps + 1):
            writer.write(TrainingBatch(id=str(step), step=step, samples=[], plan=[[]], group_ids=[], actor_offset=0))
        writer.close()
    return root


def test_a_trainer_alone_takes_as_many_steps_as_are_recorded(tmp_path: Path) -> None:
    root = record_batches(tmp_path / "other", 3)
    alone = config("finetune", finetune={"max_train_steps": 10})
    alone = alone.model_copy(update={"debug": alone.debug.model_copy(update={"streams_from": str(root)})})
    streams = recorded_streams(alone)
    assert streams is not None and count_batches(streams) == 3
    before = sorted(path.stat().st_mtime_ns for path in root.rglob("*"))
    assert bounded_by_record(alone).finetune.max_train_steps == 3
    fewer = alone.model_copy(update={"finetune": alone.finetune.model_copy(update={"max_train_steps": 2})})
    assert bounded_by_record(fewer).finetune.max_train_steps == 2
    assert sorted(path.stat().st_mtime_ns for path in root.rglob("*")) == before, "the other run is only read"
    assert bounded_by_record(config("")).finetune.max_train_steps == config("").finetune.max_train_steps


@pytest.mark.parametrize(
    ("steps", "backend", "expected"), [(0, "files", "a run with batches"), (1, "redis", "a run with streams=files")]
)
def test_streams_that_cannot_be_read_are_refused(tmp_path: Path, steps: int, backend: str, expected: str) -> None:
    root = record_batches(tmp_path / "other", steps, backend)
    alone = RunConfig.model_validate({"output_dir": "x", "debug": {"mode": "finetune", "streams_from": str(root)}})
    with pytest.raises(ConfigError, match=expected):
        bounded_by_record(alone)
    nothing = alone.model_copy(update={"debug": alone.debug.model_copy(update={"streams_from": str(tmp_path / "no")})})
    with pytest.raises(ConfigError):
        recorded_streams(nothing)
