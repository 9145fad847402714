"""`python -m pipelinerl.launch` from outside: help, plan, and one clear message with exit code 2 for bad input."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.model_folder import save_model_folder
from fakes.ports import free_port

from pipelinerl.launch import main

TASK = """
def load_problems(dataset_names, **kwargs):
    return [{"dataset": name, "answer": 1} for name in dataset_names] if MODE != "empty" else []


async def generate_rollout(cfg, llm, problem, session):
    raise RuntimeError("not called in these tests")


async def wrong_signature(problem):
    raise RuntimeError("not called in these tests")
"""


def launch_process(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-m", "pipelinerl.launch", *argv],
        cwd=cwd,
        env={**variables, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launch:
    """As `launch_process`, without a process."""

    def run(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            patch.setattr(sys, "path", [*sys.path])
            for name, value in env.items():
                patch.setenv(name, value)
            code = main(argv)
        said = capfd.readouterr()
        return subprocess.CompletedProcess(argv, code, said.out, said.err)

    return run


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: tuple[int, ...]) -> None:
    words = " ".join(f"{fd}>&-" for fd in closed)
    command = f"{sys.executable} -m pipelinerl.launch --config-name quickstart output_dir=out dry_run=true {words}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stderr.startswith("error: ")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_folder(tmp_path / "model")


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """Arguments of a run whose task lies in a file of the user, next to the configuration."""
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "full_task.py").write_text('MODE = "full"\n' + TASK)
    (folder / "empty_task.py").write_text('MODE = "empty"\n' + TASK)
    (folder / "mine.yaml").write_text(
        "defaults: [quickstart, _self_]\n"
        "dataset_loader: full_task.load_problems\n"
        "dataset_loader_params: {}\n"
        "actor: {rollout_policy: full_task.generate_rollout}\n"
        "train_dataset_names: [train]\n"
        "test_dataset_names: [test]\n"
    )
    return ["--config-dir", str(folder), "--config-name", "mine", "output_dir=out"]


def test_help_and_missing_output_dir(tmp_path: Path) -> None:
    shown = launch_process("--help", cwd=tmp_path)
    assert shown.returncode == 0 and "output_dir" in shown.stdout
    assert_refused(launch_process(cwd=tmp_path), "output_dir", "python -m pipelinerl.launch")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_and_touches_nothing(launch: Launch, tmp_path: Path) -> None:
    done = launch("--config-name", "quickstart", "output_dir=out", "dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("device cpu", "actor_llm_0", "finetune_0", "cores", "-m pipelinerl.inference.main"):
        assert text in done.stdout
    assert "actor_llm_1" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_o4_a_dry_run_plans_for_the_gpus_in_the_environment(launch: Launch, tmp_path: Path) -> None:
    done = launch("output_dir=out", "dry_run=true", cwd=tmp_path, CUDA_VISIBLE_DEVICES="7,6,5,4,3,2,1,0")
    assert "4 actor server(s), 0 reference server(s), 4 trainer rank(s)" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=3,2,1,0" in done.stdout


def test_an_impossible_split_is_refused_with_the_numbers(launch: Launch, tmp_path: Path) -> None:
    done = launch(
        "output_dir=out", "dry_run=true", "world.num_finetune_ranks=2", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0"
    )
    assert_refused(done, "1 node(s) x 1 GPU(s)", "colocated")


@pytest.mark.parametrize("name", ["base", "agent"])
def test_a_configuration_without_a_task(launch: Launch, tmp_path: Path, name: str) -> None:
    words = ("actor.rollout_policy: got None", "--config-name math|guessing|quickstart")
    assert_refused(launch("--config-name", name, "output_dir=out", cwd=tmp_path), *words)
    planned = launch("--config-name", name, "output_dir=out", "dry_run=true", cwd=tmp_path)
    assert planned.returncode == 0 and f"note: this cannot be started as it is: {words[0]}" in planned.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_the_math_experiment_is_planned(launch: Launch, tmp_path: Path) -> None:
    planned = launch("output_dir=out", "dry_run=true", cwd=tmp_path)
    assert planned.returncode == 0 and "note:" not in planned.stdout
    named = launch("--config-name", "math", "output_dir=out", "dry_run=true", cwd=tmp_path)
    # The ports of servers are those that are free at the moment.
    assert re.sub(r"\d{4,}", "", planned.stdout) == re.sub(r"\d{4,}", "", named.stdout)


def test_an_unknown_key(launch: Launch, tmp_path: Path) -> None:
    assert_refused(launch("output_dir=out", "attemps=3", cwd=tmp_path), "attemps", "attempts")


def test_gpus_that_are_not_there(launch: Launch, tmp_path: Path, task: list[str], model: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    done = launch(*task, f"model_path={model}", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert_refused(done, "CUDA_VISIBLE_DEVICES", "world.device=cpu")


def test_a_missing_model_folder(launch: Launch, tmp_path: Path, task: list[str]) -> None:
    assert_refused(launch(*task, "model_path=./no/model", cwd=tmp_path), "model_path")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dataset_loader=no_such_module.load", ("dataset_loader: ", "no module 'no_such_module'", "next to your")),
        ("dataset_loader=empty_task.load_problems", ("train_dataset_names",)),
    ],
)
def test_user_code_that_cannot_be_used(
    launch: Launch, tmp_path: Path, task: list[str], model: Path, override: str, words: tuple[str, ...]
) -> None:
    assert_refused(launch(*task, f"model_path={model}", override, cwd=tmp_path), *words)
    assert not (tmp_path / "out").exists()


def test_a_used_port(launch: Launch, tmp_path: Path, task: list[str], model: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = launch(*task, f"model_path={model}", f"world.llm_start_port={port}", cwd=tmp_path)
    assert_refused(done, "world.llm_start_port", str(port))
    assert not (tmp_path / "out").exists()


def test_d3_a_directory_of_another_run(launch: Launch, tmp_path: Path, task: list[str], model: Path) -> None:
    (tmp_path / "out" / "streams").mkdir(parents=True)
    done = launch(*task, f"model_path={model}", cwd=tmp_path)
    assert_refused(done, "output_dir", "force_restart=true")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["streams"]


def test_a_dry_run_never_loads_torch_or_vllm(tmp_path: Path) -> None:
    script = (
        "import sys; from pipelinerl.launch import main\n"
        "code = main(['--config-name', 'quickstart', 'output_dir=out', 'dry_run=true'])\n"
        "assert code == 0 and not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=300, stdout=subprocess.DEVNULL)


def test_a_signal_while_a_node_waits_for_the_first_one_is_its_exit_code(model: Path, tmp_path: Path) -> None:
    """A scheduler's SIGTERM is 143, which scripts tell from Ctrl-C."""
    pytest.importorskip("ray")
    words = ["--config-name", "quickstart", f"model_path={model}", f"world.node_port={free_port()}"]
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "RAY_AUTH_TOKEN": "0123456789abcdef"}
    node = subprocess.Popen(
        [sys.executable, "-m", "pipelinerl.launch", *words, "output_dir=out"],
        cwd=tmp_path,
        env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert node.stderr is not None and "node 0" in node.stderr.readline()
        node.terminate()
        said = node.communicate(timeout=60)[1]
        assert "interrupted" in said and "Traceback" not in said
        assert node.returncode == 128 + signal.SIGTERM
    finally:
        node.kill()
        node.wait()
