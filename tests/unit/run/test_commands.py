"""Command lines and environments: what is in them, and what must never be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipelinerl.run.commands import build_command, child_environment
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job, WorldMap


def job(kind: str, idx: int = 0, gpus: tuple[str, ...] = (), node: int = 0, local_idx: int | None = None) -> Job:
    return Job(
        kind, f"{kind}_{idx}", idx, idx if local_idx is None else local_idx, node, f"10.0.0.{node}", list(gpus),
        None, None, None, 3,
    )  # fmt: skip


def world(jobs: list[Job], device: str = "cuda") -> WorldMap:
    return WorldMap(jobs, "cpu" if device == "cpu" else "cuda", 2, 0, 1, "10.0.0.1", 29500)


RUN = RunDir(Path("/runs/a run"))


def test_o4_a_trainer_rank_sees_the_devices_of_its_node_and_knows_its_place() -> None:
    ranks = [job("finetune", 0, ("6",)), job("finetune", 1, ("7",)), job("finetune", 2, ("0",), node=1, local_idx=0)]
    command = build_command(ranks[1], world(ranks), RUN, {}, python="/py")
    assert command.argv == (
        "/py", "-m", "pipelinerl.finetune.main", "--run-dir", "/runs/a run", "--job", "finetune_1"
    )  # fmt: skip
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
    }


def test_a_server_sees_its_own_devices_and_others_none() -> None:
    jobs = [job("actor_llm", 0, ("GPU-a", "GPU-b")), job("actor")]
    assert build_command(jobs[0], world(jobs), RUN, {}).env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert build_command(jobs[1], world(jobs), RUN, {}).env["CUDA_VISIBLE_DEVICES"] == ""
    assert "RANK" not in build_command(jobs[0], world(jobs), RUN, {}).env


@pytest.mark.parametrize(
    ("kind", "module"),
    [("actor_llm", "inference.main"), ("preprocessor_llm", "inference.main"), ("actor", "actor.main")],
)
def test_every_kind_has_its_entry_point(kind: str, module: str) -> None:
    jobs = [job(kind)]
    assert build_command(jobs[0], world(jobs), RUN, {}).argv[2] == f"pipelinerl.{module}"


def test_user_folders_are_on_the_path_of_those_who_import_user_code() -> None:
    jobs = [job("actor"), job("preprocessor")]
    folders = [Path("/home/me/task")]
    assert build_command(jobs[0], world(jobs), RUN, {"PYTHONPATH": "/x"}, folders).env["PYTHONPATH"] == (
        "/home/me/task:/x"
    )
    assert "PYTHONPATH" not in build_command(jobs[1], world(jobs), RUN, {}, folders).env


def test_o4_a_proxy_is_bypassed_and_the_users_list_is_kept() -> None:
    jobs = [job("actor")]
    env = build_command(jobs[0], world(jobs), RUN, {"http_proxy": "http://p:1", "no_proxy": "my.host,::1"}).env
    assert env["NO_PROXY"] == env["no_proxy"] == "my.host,::1,127.0.0.1,localhost,10.0.0.0"


def test_o5_secrets_are_in_the_environment_only() -> None:
    jobs = [job("actor")]
    environ = {"WANDB_API_KEY": "wandb-secret", "PATH": "/bin", "RANK": "5", "MASTER_ADDR": "node-0"}
    environ["PIPELINERL_NODE_SECRET"] = "node-secret-of-all"
    command = build_command(jobs[0], world(jobs), RUN, environ)
    env = child_environment(command, environ, token="server-secret", death_fd=7)
    assert (env["PIPELINERL_SERVER_TOKEN"], env["PIPELINERL_DEATH_FD"]) == ("server-secret", "7")
    assert env["WANDB_API_KEY"] == "wandb-secret"
    assert "RANK" not in env and "MASTER_ADDR" not in env
    assert "node-secret-of-all" not in env.values(), "it is for the launchers alone"
    written = command.script() + " ".join(command.argv) + repr(dict(command.env))
    assert "secret" not in written


def test_command_sh_is_a_script_that_asks_for_the_token(tmp_path: Path) -> None:
    jobs = [job("actor")]
    script = tmp_path / "command.sh"
    script.write_text(build_command(jobs[0], world(jobs), RUN, {}, python="/bin/echo").script())
    denied = subprocess.run(["sh", str(script)], env={}, capture_output=True, text=True, timeout=300, check=False)
    assert denied.returncode != 0 and "export the token" in denied.stderr
    ran = subprocess.run(
        ["sh", str(script)],
        env={"PIPELINERL_SERVER_TOKEN": "t"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ran.stdout == "-m pipelinerl.actor.main --run-dir /runs/a run --job actor_0\n"
