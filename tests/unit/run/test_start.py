"""How a run starts: its directory (line D3), and the commands and environment of its jobs (lines O4 and O5)."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import tempfile
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.config.resources import FileStreams
from pipelinerl.errors import ConfigError
from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted
from pipelinerl.run import start as start_module
from pipelinerl.run.start import (
    SOCKET_FOLDER_KEY,
    build_command,
    child_environment,
    enter,
    inspect,
    server_sockets,
    socket_parent,
)
from pipelinerl.rundir.durable import FileLock, ScratchFolder
from pipelinerl.rundir.layout import RunDir, RunIdentity, read_identity
from pipelinerl.streams.base import TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import find_run
from pipelinerl.world import Job, WorldMap


def config(root: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(root), **changes})


def contents(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def start(root: Path, trained: bool = False, **changes: Any) -> RunDir:
    """A run that was started, and ended."""
    run_config = config(root, **changes)
    with enter(run_config) as entered:
        save_config(run_config, entered.run_dir.config_file)
    writer = StreamHub(FileStreams(), RunDir(root), entered.identity.run_id).writer(
        TRAINER_TOPIC, "finetune_0", TrainerMessage
    )
    writer.write(TrainerStarted(step=0, data_offset=0, time=1.0))
    if trained:
        writer.write(StepDone(step=1, time=2.0, group_ids=["g"], num_samples=8, samples_processed=8))
    writer.close()
    return entered.run_dir


def write_summary(run_dir: RunDir, **content: Any) -> None:
    run_dir.summary_file.write_text(json.dumps(content))


def refusal(root: Path, **changes: Any) -> ConfigError:
    before = contents(root)
    with pytest.raises(ConfigError) as caught:
        inspect(config(root, **changes))
    assert contents(root) == before, "a refusal changes nothing"
    return caught.value


def test_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for root in (tmp_path, tmp_path / "a" / "b"):
        assert inspect(config(root)).kind == "new" and not (tmp_path / "a").exists()
    with enter(config(tmp_path / "a" / "b")) as entered:
        identity = read_identity(entered.run_dir.identity_file)
        assert identity.run_id.startswith("b-") and identity.incarnation == 0


def test_two_launchers_never_share_a_directory(tmp_path: Path) -> None:
    with enter(config(tmp_path)):
        for force in (False, True):
            assert refusal(tmp_path, force_restart=force).key == "output_dir"
    with enter(config(tmp_path)) as entered:
        assert entered.identity.incarnation == 1


def test_a_mount_point_cannot_be_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path)
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path)
    assert str(tmp_path / "run") in refusal(tmp_path, force_restart=True).next_step
    assert inspect(config(tmp_path)).kind == "continue"
    # Of a run that trained nothing yet, a fixed value may change: that moves it aside, too.
    with pytest.raises(ConfigError) as found:
        inspect(config(tmp_path, seed=8))
    assert str(tmp_path / "run") in found.value.next_step


@pytest.mark.parametrize("content", ["streams", "finetune/current"])
def test_d3_foreign_streams_or_weights_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / content).mkdir(parents=True)
    assert "force_restart=true" in refusal(tmp_path).next_step


@pytest.mark.parametrize(
    ("deleted", "named"),
    [
        ("streams", "streams"),
        ("streams/trainer", "streams/trainer/finetune_0/0"),
        ("streams/trainer/finetune_0/0/*", "streams/trainer/finetune_0/0"),
    ],
)
def test_a_run_whose_streams_were_deleted_is_not_continued(tmp_path: Path, deleted: str, named: str) -> None:
    run_dir = start(tmp_path, trained=True)
    run_dir.current_model.mkdir(parents=True)
    assert inspect(config(tmp_path)).kind == "continue"
    for path in tmp_path.glob(deleted):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    error = refusal(tmp_path)
    assert error.key == "output_dir" and f"missing: {named})" in str(error) and "\n" not in str(error)
    assert inspect(config(tmp_path, force_restart=True)).kind == "move_aside"


def test_a_start_that_came_to_no_stream_is_continued(tmp_path: Path) -> None:
    with enter(config(tmp_path)) as entered:
        save_config(config(tmp_path), entered.run_dir.config_file)
    assert inspect(config(tmp_path)).kind == "continue"


def test_a_complete_run_is_continued_only_if_there_is_more_to_train(tmp_path: Path) -> None:
    run_dir = start(tmp_path)
    write_summary(run_dir, status="completed", steps=1000)
    assert "1000" in refusal(tmp_path).next_step
    more = config(tmp_path, finetune={"max_train_steps": 1001})
    with enter(more) as entered:
        assert entered.identity.incarnation == 1
        assert not run_dir.summary_file.exists(), "it tells how the previous start ended"


@pytest.mark.parametrize(
    ("finetune", "continues"),
    [({"max_epochs": 2}, False), ({"max_epochs": 1}, False), ({"max_epochs": 3}, True), ({}, True)],
)
def test_a_run_that_ended_after_its_epochs_is_complete(
    tmp_path: Path, finetune: dict[str, int], continues: bool
) -> None:
    """It ended before max_train_steps, and there is nothing to train up to there."""
    write_summary(start(tmp_path, finetune={"max_epochs": 2}), status="completed", steps=7)
    if continues:
        assert inspect(config(tmp_path, finetune=finetune)).kind == "continue"
    else:
        assert "max_epochs" in refusal(tmp_path, finetune=finetune).next_step


def test_the_same_run_continues_and_free_changes_are_listed(tmp_path: Path) -> None:
    run_id = read_identity(start(tmp_path, trained=True).identity_file).run_id
    assert inspect(config(tmp_path)).changes == ()
    finetune = {"max_train_steps": 7, "lora": {"sync": "adapter"}}
    changed = config(tmp_path, max_lag=3, finetune=finetune, world={"num_actor_llms": 2})
    decision = inspect(changed)
    assert (decision.kind, decision.identity) == ("continue", RunIdentity(run_id=run_id, incarnation=1))
    assert {change.key for change in decision.changes} == {
        *("max_lag", "finetune.lora.sync", "finetune.max_train_steps", "world.num_actor_llms")
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_path": "other"}, "model_path"),
        ({"seed": 7}, "seed"),
        ({"streams": {"backend": "redis"}}, "streams.backend"),
        ({"dataset_loader": "a.b"}, "dataset_loader"),
        ({"dataset_loader_params": {"size": 3}}, "dataset_loader_params"),
        ({"train_dataset_names": ["x"]}, "train_dataset_names"),
        ({"backend": {"type": "fsdp"}}, "backend.type"),
        ({"finetune": {"lora": {"enabled": True}}}, "finetune.lora.enabled"),
    ],
)
def test_d3_changes_that_would_corrupt_are_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    start(tmp_path, trained=True)
    error = refusal(tmp_path, max_lag=3, **changes)
    assert error.key == key and "max_lag" not in error.next_step


LOCAL = {"finetune": {"rl": {"kl_coef": 0.1, "reference": "local"}}}
AUTO = {"finetune": {"rl": {"kl_coef": 0.1}}}
POOL = {"world": {"preprocessor_fraction": 1}}
SERVERS = {"finetune": {"rl": {"kl_coef": 0.1, "reference": "servers"}}, **POOL}


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (LOCAL, SERVERS, "finetune.rl.reference"),
        (AUTO, {**AUTO, **POOL}, "world.preprocessor_fraction"),
        (AUTO, {**AUTO, "world": {"num_preprocessor_llms": 1}}, "world.num_preprocessor_llms"),
        ({}, {**AUTO, **POOL}, "finetune.rl.kl_coef"),
        (POOL, {"finetune": {"rl": {"reward_minus_kl_coef": 0.1}}, **POOL}, "finetune.rl.reward_minus_kl_coef"),
        (SERVERS, LOCAL, None),
        (SERVERS, SERVERS, None),
        (POOL, POOL, None),
    ],
)
def test_reference_servers_are_not_brought_into_a_run(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], key: str | None
) -> None:
    """Batches that wait in the stream have no log-probs of them."""
    start(tmp_path, trained=True, **old)
    with pytest.raises(ConfigError) if key else nullcontext() as caught:
        assert inspect(config(tmp_path, **new)).kind == "continue"
    assert (caught and caught.value.key) == key


def test_a_start_that_trained_nothing_may_be_corrected_in_the_same_folder(tmp_path: Path) -> None:
    root = tmp_path / "r"
    run_dir = start(root, model_path="wrong")
    (root / "finetune" / ".ranks-run-a-0").mkdir(parents=True)
    write_summary(run_dir, status="failed", steps=0)
    assert inspect(config(root, model_path="wrong", max_lag=3)).kind == "continue"
    before = contents(root)
    old = read_identity(run_dir.identity_file)
    with enter(config(root, model_path="right")) as entered:
        assert entered.identity.run_id != old.run_id and entered.identity.incarnation == 0
        assert [change.key for change in entered.changes] == ["model_path"]
        # Nothing of the old try is left for the new one to read, and nothing of it is lost.
        assert contents(root) == {root / "conf", root / "conf" / "run.json", root / "conf" / "launch.lock"}
        moved_to = entered.moved_to
        assert moved_to is not None
        assert {path.relative_to(root) for path in before} == {
            path.relative_to(moved_to) for path in contents(moved_to)
        }


@pytest.mark.parametrize("trace", ["model", "training state", "summary", "step", "damaged stream", "stage"])
def test_every_trace_of_training_keeps_the_fixed_values(trace: str, tmp_path: Path) -> None:
    debug = {"debug": {"mode": "actor"}} if trace == "stage" else {}
    run_dir = start(tmp_path, trained=trace == "step", model_path="right", **debug)
    if trace == "model":
        run_dir.current_model.mkdir(parents=True)
    elif trace == "training state":
        run_dir.training_state(3).mkdir(parents=True)
    elif trace == "summary":
        write_summary(run_dir, status="failed", steps=1)
    elif trace == "damaged stream":
        (shard,) = (run_dir.streams / "trainer").rglob("*.jsonl")
        shard.write_text("not a record\n")
    assert refusal(tmp_path, model_path="other", **debug).key == "model_path"


@pytest.mark.parametrize(("steps", "is_kept"), [(0, False), (2, True), (None, True)])
def test_a_run_with_redis_is_judged_by_its_summary(steps: int | None, is_kept: bool, tmp_path: Path) -> None:
    redis = {"streams": {"backend": "redis"}}
    run_dir = start(tmp_path, **redis, model_path="right")
    write_summary(run_dir, status="failed", **({} if steps is None else {"steps": steps}))
    if is_kept:
        assert refusal(tmp_path, **redis, model_path="other").key == "model_path"
    else:
        assert inspect(config(tmp_path, **redis, model_path="other")).kind == "move_aside"


def test_force_restart_moves_the_old_run_aside(tmp_path: Path) -> None:
    root = tmp_path / "r"
    old = read_identity(start(root).identity_file)
    with enter(config(root, force_restart=True)) as entered:
        assert entered.moved_to is not None and (entered.moved_to / "streams").is_dir()
        assert entered.moved_to.parent == tmp_path and not (root / "streams").exists()
        assert read_identity(entered.run_dir.identity_file).run_id == entered.identity.run_id != old.run_id


@pytest.mark.parametrize("kind", ["new", "continue", "move_aside"])
def test_d3_a_directory_that_another_launcher_takes_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    root = tmp_path / "r"
    if kind != "new":
        start(root)
    running: list[Any] = []

    def lock_slowly(run_dir: RunDir) -> FileLock:
        if not running:
            monkeypatch.setattr(start_module, "_lock", lock)
            other = enter(config(root))
            running.extend((other, other.__enter__(), contents(tmp_path)))
        return lock(run_dir)

    lock = start_module._lock
    monkeypatch.setattr(start_module, "_lock", lock_slowly)
    with pytest.raises(ConfigError, match="no other launcher"), enter(config(root, force_restart=kind == "move_aside")):
        pass
    other, entered, before = running
    assert contents(tmp_path) == before and read_identity(entered.run_dir.identity_file) == entered.identity
    other.__exit__(None, None, None)


def test_d3_a_run_that_came_and_went_before_the_lock_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_slowly(run_dir: RunDir) -> FileLock:
        with monkeypatch.context() as quick:
            quick.setattr(start_module, "_lock", lock)
            start(tmp_path)
        return lock(run_dir)

    lock = start_module._lock
    monkeypatch.setattr(start_module, "_lock", lock_slowly)
    with enter(config(tmp_path)) as entered:
        assert (entered.kind, entered.identity.incarnation) == ("continue", 1)


@pytest.mark.parametrize("folder", ["f", "f/below", "n" * 300, "/proc/no/run", "/sys/run"])
def test_a_directory_that_the_system_refuses(tmp_path: Path, folder: str) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError) as caught, enter(config(tmp_path / folder)):
        pass
    assert caught.value.key == "output_dir"


def test_o1_a_full_disk_is_no_traceback_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: Path, identity: RunIdentity) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with monkeypatch.context() as full:
        full.setattr(start_module, "write_identity", write)
        with pytest.raises(ConfigError, match=r"No space left on device \(.*run\.json\)"), enter(config(tmp_path)):
            pass
    with enter(config(tmp_path)):
        pass


def test_a_folder_that_is_no_run_is_refused_with_the_runs_in_it(tmp_path: Path) -> None:
    start(tmp_path / "a")
    for wrong, hint in ((tmp_path, str(tmp_path / "a")), (tmp_path / "no", "output_dir")):
        with pytest.raises(ConfigError) as caught:
            find_run(wrong)
        assert hint in caught.value.next_step


def test_a_damaged_identity_or_summary_is_named(tmp_path: Path) -> None:
    run_dir = start(tmp_path)
    for file in (run_dir.summary_file, run_dir.identity_file):
        file.write_text("{")
        assert file.name in str(refusal(tmp_path))


RUN = RunDir(Path("/runs/a run"))


def job(kind: str, idx: int = 0, gpus: tuple[str, ...] = (), node: int = 0, local_idx: int | None = None) -> Job:
    local = idx if local_idx is None else local_idx
    return Job(kind, f"{kind}_{idx}", idx, local, node, f"10.0.0.{node}", list(gpus), None, None, None, 3)


def world(*jobs: Job) -> WorldMap:
    return WorldMap(list(jobs), "cuda", 2, "10.0.0.1", 29500)


def test_o4_a_trainer_rank_sees_the_devices_of_its_node_and_knows_its_place() -> None:
    ranks = [job("finetune", 0, ("6",)), job("finetune", 1, ("7",)), job("finetune", 2, ("0",), node=1, local_idx=0)]
    command = build_command(ranks[1], world(*ranks), RUN, {})
    assert command.argv[1:] == ("-m", "pipelinerl.finetune.main", "--run-dir", "/runs/a run", "--job", "finetune_1")
    assert dict(command.env) == {
        "PIPELINERL_JOB": "finetune_1",
        "CUDA_VISIBLE_DEVICES": "6,7",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "NO_PROXY": "127.0.0.1,localhost,::1,10.0.0.0,10.0.0.1",
        "no_proxy": "127.0.0.1,localhost,::1,10.0.0.0,10.0.0.1",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize(
    ("kind", "device", "environ", "expected"),
    [
        ("finetune", "cuda", {}, "expandable_segments:True"),
        ("finetune", "cuda", {"PYTORCH_CUDA_ALLOC_CONF": ""}, None),
        ("finetune", "cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("finetune", "cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ("finetune", "cpu", {}, None),
        ("actor_llm", "cuda", {}, None),
    ],
)
def test_a_trainers_allocator_leaves_no_gaps_unless_the_user_set_it(
    kind: str, device: str, environ: dict[str, str], expected: str | None
) -> None:
    each = job(kind)
    plan = msgspec.structs.replace(world(each), device=device)
    assert build_command(each, plan, RUN, environ).env.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    # What is set on the node of the job counts as well.
    command = build_command(each, plan, RUN, {})
    env = child_environment(command, environ, token="", death_fd=7)
    assert env.get("PYTORCH_CUDA_ALLOC_CONF") == environ.get("PYTORCH_CUDA_ALLOC_CONF", expected)


def test_o4_a_server_sees_its_own_devices_and_others_none() -> None:
    jobs = [job("actor_llm", 0, ("GPU-a", "GPU-b")), job("actor")]
    environs = [build_command(each, world(*jobs), RUN, {}).env for each in jobs]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environs] == ["GPU-a,GPU-b", ""]
    assert "RANK" not in environs[0]


@pytest.mark.parametrize("kind", ["actor", "verifier", "preprocessor", "finetune", "actor_llm"])
def test_user_folders_are_on_the_path_of_those_who_import_user_code(kind: str) -> None:
    env = build_command(job(kind), world(job(kind)), RUN, {"PYTHONPATH": "/x"}, [Path("/home/me/task")]).env
    assert env.get("PYTHONPATH") == ("/home/me/task:/x" if kind in ("actor", "verifier") else None)


def test_o4_a_proxy_is_bypassed_and_the_users_list_is_kept() -> None:
    environ = {"http_proxy": "http://p:1", "no_proxy": "my.host,::1"}
    env = build_command(job("actor"), world(job("actor")), RUN, environ).env
    assert env["NO_PROXY"] == env["no_proxy"] == "my.host,::1,127.0.0.1,localhost,10.0.0.0"


def test_o5_secrets_are_in_the_environment_only() -> None:
    """X5: and variables of ranks, of launchers and of nodes are not inherited."""
    environ = {"WANDB_API_KEY": "wandb-secret", "PATH": "/bin", "RANK": "5", "MASTER_ADDR": "node-0"}
    environ["RAY_AUTH_TOKEN"] = "node-secret-of-all"
    environ |= {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = build_command(job("actor"), world(job("actor")), RUN, environ)
    env = child_environment(command, environ, token="server-secret", death_fd=7)
    assert (env["PIPELINERL_SERVER_TOKEN"], env["PIPELINERL_DEATH_FD"]) == ("server-secret", "7")
    assert env["WANDB_API_KEY"] == "wandb-secret"
    assert "RANK" not in env and "MASTER_ADDR" not in env
    assert not any(name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")) for name in env), "the config decides"
    assert "node-secret-of-all" not in env.values(), "it is for the launchers alone"
    script = command.script()
    assert "secret" not in script + " ".join(command.argv) + repr(dict(command.env))
    assert "PIPELINERL_SERVER_TOKEN" in script and "'/runs/a run'" in script


def test_sockets_of_servers_go_with_the_run() -> None:
    """X6: they lie in a short folder of their own."""
    with server_sockets({"A": "1"}) as environ, socket.socket(socket.AF_UNIX) as left_behind:
        folder = Path(environ[SOCKET_FOLDER_KEY])
        left_behind.bind(str(folder / str(uuid.uuid4())))
        assert environ["A"] == "1" and folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_l9_folders_of_killed_launchers_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir()
    left, link = tmp_path / "pipelinerl-sockets-left", tmp_path / "pipelinerl-sockets-link"
    left.mkdir()
    (left / "socket").touch()
    link.symlink_to(tmp_path / "mine")
    with ScratchFolder("sockets") as first, ScratchFolder("sockets") as second, ScratchFolder("check") as third:
        assert first != second and set(tmp_path.iterdir()) == {tmp_path / "mine", link, first, second, third}
    assert set(tmp_path.iterdir()) == {tmp_path / "mine", link}


@pytest.mark.parametrize("case", ["short", "too long", "missing"])
def test_x6_sockets_lie_where_their_paths_are_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A cluster's TMPDIR had 78 characters, and the servers died of it."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp", prefix="t")) if case == "short" else tmp_path / ("d" * 78)
    if case == "too long":
        temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with server_sockets({"A": "1"}) as environ, socket.socket(socket.AF_UNIX) as used:
        folder = Path(environ[SOCKET_FOLDER_KEY])
        used.bind(str(folder / str(uuid.uuid4())))
        assert folder.parent == (temporary if case == "short" else Path("/tmp"))
    assert not folder.exists() and not (temporary.exists() and any(temporary.iterdir()))
    monkeypatch.setattr(start_module, "_SHORT_FOLDERS", ())
    assert (socket_parent({}) is None) == (case != "short")
    with server_sockets({"A": "1"}) as environ:
        assert (environ == {"A": "1"}) == (case != "short")
    shutil.rmtree(temporary, ignore_errors=True)


def test_the_users_own_folder_for_sockets_is_kept(tmp_path: Path) -> None:
    given = {SOCKET_FOLDER_KEY: str(tmp_path)}
    with server_sockets(given) as environ:
        assert environ == given
    lengths = {70: "/tmp/" + "x" * 65, 71: "/tmp/" + "x" * 66}
    for folder in lengths.values():
        Path(folder).mkdir(exist_ok=True)
    found = [socket_parent({SOCKET_FOLDER_KEY: folder}) for folder in lengths.values()]
    for folder in lengths.values():
        Path(folder).rmdir()
    assert found == [lengths[70], None]
