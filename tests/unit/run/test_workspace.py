"""The run directory: new, continued, moved aside, or refused with nothing changed (line D3)."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.config.sections import StreamsConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted
from pipelinerl.run import workspace as workspace_module
from pipelinerl.run.open_run import find_run
from pipelinerl.run.workspace import config_hash, enter, inspect
from pipelinerl.rundir.identity import RunIdentity, read_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub


def config(root: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(root), **changes})


def contents(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def start(root: Path, **changes: Any) -> None:
    started = config(root, **changes)
    enter(inspect(started, "run-a")).close()
    save_config(started, RunDir(root).config_file)


def started(step: int) -> TrainerStarted:
    return TrainerStarted(step=step, data_offset=0, time=1.0)


def step_done(step: int) -> StepDone:
    return StepDone(step=step, time=2.0, group_ids=["g"], num_samples=8, samples_processed=8)


def write_trainer_messages(root: Path, *messages: TrainerStarted | StepDone) -> None:
    writer = StreamHub(StreamsConfig(), RunDir(root), "run-a").writer(TRAINER_TOPIC, "finetune_0", TrainerMessage)
    for message in messages:
        writer.write(message)
    writer.close()


def test_a_new_directory(tmp_path: Path) -> None:
    decision = inspect(config(tmp_path / "a" / "b"), "run-1")
    assert decision.kind == "new" and not (tmp_path / "a").exists()
    workspace = enter(decision)
    assert read_identity(workspace.run_dir.identity_file).run_id == "run-1"
    assert read_identity(workspace.run_dir.identity_file).incarnation == 0
    workspace.close()


def test_a_directory_with_unrelated_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert inspect(config(tmp_path), "run-1").kind == "new"


def test_two_launchers_never_share_a_directory(tmp_path: Path) -> None:
    decision = inspect(config(tmp_path / "r"), "run-1")
    workspace = enter(decision)
    with pytest.raises(ConfigError, match="no other launcher"):
        inspect(config(tmp_path / "r", force_restart=True), "run-2")
    with pytest.raises(ConfigError, match="no other launcher"):
        enter(decision)
    workspace.close()


@pytest.mark.parametrize("content", ["streams", "finetune/current"])
def test_foreign_streams_or_weights_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / content).mkdir(parents=True)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"holds streams or weights.*force_restart=true"):
        inspect(config(tmp_path), "run-1")
    assert contents(tmp_path) == before


def test_a_complete_run_is_continued_only_if_there_is_more_to_train(tmp_path: Path) -> None:
    start(tmp_path)
    RunDir(tmp_path).summary_file.write_text(json.dumps({"status": "completed", "steps": 1000}))
    with pytest.raises(ConfigError, match=r"run run-a in it is complete.*max_train_steps to more than 1000"):
        inspect(config(tmp_path), "run-b")
    decision = inspect(config(tmp_path, finetune={"max_train_steps": 1001}), "run-b")
    assert decision.kind == "continue" and RunDir(tmp_path).summary_file.exists()
    enter(decision).close()
    assert not RunDir(tmp_path).summary_file.exists(), "it says how the start before ended"


@pytest.mark.parametrize(
    ("finetune", "continues"),
    [({"max_epochs": 2}, False), ({"max_epochs": 1}, False), ({"max_epochs": 3}, True), ({}, True)],
)
def test_a_run_that_passes_ended_is_complete(tmp_path: Path, finetune: dict[str, int], continues: bool) -> None:
    """It ended before max_train_steps, and there is nothing to train up to there."""
    start(tmp_path, finetune={"max_epochs": 2})
    RunDir(tmp_path).summary_file.write_text(json.dumps({"status": "completed", "steps": 7}))
    if continues:
        assert inspect(config(tmp_path, finetune=finetune), "run-b").kind == "continue"
    else:
        with pytest.raises(ConfigError, match=r"run run-a in it is complete.*max_epochs .*to more than 2 to train on"):
            inspect(config(tmp_path, finetune=finetune), "run-b")


def test_the_same_run_continues_with_or_without_a_checkpoint(tmp_path: Path) -> None:
    start(tmp_path)
    decision = inspect(config(tmp_path), "run-b")
    assert (decision.kind, decision.changes) == ("continue", ())
    assert (decision.identity.run_id, decision.identity.incarnation) == ("run-a", 1)
    enter(decision).close()
    RunDir(tmp_path).training_state(5).mkdir(parents=True)
    assert inspect(config(tmp_path), "run-b").identity.incarnation == 2


def test_harmless_changes_are_listed(tmp_path: Path) -> None:
    start(tmp_path)
    finetune = {"max_train_steps": 7, "lora": {"sync": "adapter"}}
    changed = config(tmp_path, max_lag=3, finetune=finetune, world={"num_actor_llms": 2})
    assert [str(change) for change in inspect(changed, "run-b").changes] == [
        "max_lag: None -> 3",
        "finetune.lora.sync: 'merged' -> 'adapter'",
        "finetune.max_train_steps: 1000 -> 7",
        "world.num_actor_llms: None -> 2",
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_path": "other"}, "model_path"),
        ({"seed": 7}, "seed"),
        ({"streams": {"backend": "redis"}}, "streams.backend"),
        ({"dataset_loader": "a.b"}, "dataset_loader"),
        ({"dataset_loader_params": {"size": 3}}, "dataset_loader_params"),
        ({"train_dataset_names": ["x"]}, "train_dataset_names"),
        ({"use_fsdp": True}, "use_fsdp"),
        ({"finetune": {"lora": {"enabled": True}}}, "finetune.lora.enabled"),
    ],
)
def test_d3_changes_that_would_corrupt_are_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    start(tmp_path)
    write_trainer_messages(tmp_path, started(0), step_done(1))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{key}.*force_restart=true") as refused:
        inspect(config(tmp_path, max_lag=3, **changes), "run-b")
    assert "max_lag" not in str(refused.value)
    assert contents(tmp_path) == before


def test_a_start_that_trained_nothing_may_be_corrected_in_the_same_folder(tmp_path: Path) -> None:
    root = tmp_path / "r"
    start(root, model_path="wrong")
    write_trainer_messages(root, started(0))
    (root / "finetune" / ".ranks-run-a-0").mkdir(parents=True)
    RunDir(root).summary_file.write_text(json.dumps({"status": "failed", "steps": 0}))
    before = contents(root)
    decision = inspect(config(root, model_path="right"), "run-b")
    assert contents(root) == before, "looking changes nothing"
    assert decision.kind == "move_aside" and decision.identity.run_id == "run-b" and decision.identity.incarnation == 0
    assert [str(change) for change in decision.changes] == ["model_path: 'wrong' -> 'right'"]
    workspace = enter(decision, clock=lambda: 0.0)
    # Nothing of the old try is left for the new one to read, and nothing of it is lost.
    assert contents(root) == {root / "conf", root / "conf" / "run.json", root / "conf" / "launch.lock"}
    assert workspace.moved_to is not None
    assert {path.relative_to(root) for path in before} == {
        path.relative_to(workspace.moved_to) for path in contents(workspace.moved_to)
    }
    workspace.close()


def test_without_a_fixed_change_a_start_that_trained_nothing_is_continued(tmp_path: Path) -> None:
    start(tmp_path)
    assert inspect(config(tmp_path, max_lag=3), "run-b").kind == "continue"


@pytest.mark.parametrize("trace", ["model", "training state", "summary", "step", "damaged stream"])
def test_every_trace_of_training_keeps_the_fixed_values(trace: str, tmp_path: Path) -> None:
    start(tmp_path, model_path="right")
    run_dir = RunDir(tmp_path)
    if trace == "model":
        run_dir.current_model.mkdir(parents=True)
    elif trace == "training state":
        run_dir.training_state(3).mkdir(parents=True)
    elif trace == "summary":
        run_dir.summary_file.write_text(json.dumps({"status": "failed", "steps": 1}))
    else:
        write_trainer_messages(tmp_path, started(0), step_done(1))
    if trace == "damaged stream":
        (shard,) = (run_dir.streams / "trainer").rglob("*.jsonl")
        shard.write_text("not a record\n")
    with pytest.raises(ConfigError, match=r"^model_path"):
        inspect(config(tmp_path, model_path="other"), "run-b")


@pytest.mark.parametrize(("steps", "is_kept"), [(0, False), (2, True), (None, True)])
def test_a_run_with_redis_is_judged_by_its_summary(steps: int | None, is_kept: bool, tmp_path: Path) -> None:
    streams = {"backend": "redis"}
    start(tmp_path, streams=streams, model_path="right")
    RunDir(tmp_path).summary_file.write_text(
        json.dumps({"status": "failed", **({} if steps is None else {"steps": steps})})
    )
    changed = config(tmp_path, streams=streams, model_path="other")
    if is_kept:
        with pytest.raises(ConfigError, match=r"^model_path"):
            inspect(changed, "run-b")
    else:
        assert inspect(changed, "run-b").kind == "move_aside"


def test_the_records_of_a_stage_alone_are_its_result(tmp_path: Path) -> None:
    start(tmp_path, debug={"mode": "actor"}, model_path="right")
    with pytest.raises(ConfigError, match=r"^model_path"):
        inspect(config(tmp_path, debug={"mode": "actor"}, model_path="other"), "run-b")


def test_force_restart_moves_the_old_run_aside(tmp_path: Path) -> None:
    root = tmp_path / "r"
    start(root)
    (root / "streams").mkdir()
    decision = inspect(config(root, force_restart=True), "run-b")
    assert decision.kind == "move_aside" and (root / "streams").exists()
    workspace = enter(decision, clock=lambda: 0.0)
    assert workspace.moved_to is not None and (workspace.moved_to / "streams").is_dir()
    assert workspace.moved_to.parent == tmp_path
    assert not (root / "streams").exists()
    assert read_identity(workspace.run_dir.identity_file).run_id == "run-b"
    workspace.close()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        inspect(config(tmp_path / "f"), "run")
    with pytest.raises(ConfigError, match="can be written"):
        inspect(config(tmp_path / "f" / "below"), "run")


@pytest.mark.parametrize("folder", ["n" * 300, "/proc/no/run", "/sys/run"])
def test_a_directory_that_the_system_refuses(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^output_dir: .*can be written.*Choose another output_dir"):
        enter(inspect(config(tmp_path / folder), "run"))


def test_a_full_disk_is_no_traceback_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: Path, identity: RunIdentity) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    decision = inspect(config(tmp_path / "r"), "run")
    with monkeypatch.context() as full:
        full.setattr(workspace_module, "write_identity", write)
        with pytest.raises(ConfigError, match=r"No space left on device \(.*run\.json\)"):
            enter(decision)
    enter(decision).close()


def test_a_folder_that_is_no_run_is_refused_with_the_runs_in_it(tmp_path: Path) -> None:
    start(tmp_path / "a")
    with pytest.raises(ConfigError, match=rf"expected a started run.*for instance {tmp_path / 'a'}\.$"):
        find_run(tmp_path)
    (tmp_path / "file").write_text("")
    for wrong in ("no", "file"):
        with pytest.raises(ConfigError, match=r"run\.json is missing\)\. Give the output_dir of a run\.$"):
            find_run(tmp_path / wrong)


def test_a_damaged_identity_or_summary_is_named(tmp_path: Path) -> None:
    start(tmp_path)
    RunDir(tmp_path).summary_file.write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json"):
        inspect(config(tmp_path), "run-b")
    RunDir(tmp_path).identity_file.write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json"):
        inspect(config(tmp_path), "run-b")


def test_the_hash_ignores_where_and_how_but_not_what(tmp_path: Path) -> None:
    assert config_hash(config(tmp_path / "a")) == config_hash(config(tmp_path / "b", force_restart=True))
    assert config_hash(config(tmp_path)) != config_hash(config(tmp_path, attempts=4))
