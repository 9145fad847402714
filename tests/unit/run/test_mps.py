"""MPS on shared GPUs, with a control program that is a script here; tests/gpu/test_mps_gpu.py has the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.run import mps
from pipelinerl.world import Job

# Answers as the real program does: `-d` returns once it listens, a command on standard input is one call.
CONTROL = """#!/bin/sh
if [ "$1" = "-d" ]; then
  echo "$CUDA_VISIBLE_DEVICES" > "{folder}/devices"; {start}
  echo up >> "{folder}/calls"; exit 0
fi
read -r command
echo "$command" >> "{folder}/calls"
[ "$command" = get_server_list ] && echo "{servers}"
exit 0
"""


def control(folder: Path, start: str = "true", servers: str = "4711") -> dict[str, str]:
    """Put the script on the path of an environment."""
    program = folder / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(CONTROL.format(folder=folder, start=start, servers=servers))
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "2,3"}


def job(name: str, gpus: list[str]) -> Job:
    kind, _, idx = name.rpartition("_")
    return Job(kind, name, int(idx), int(idx), 0, "127.0.0.1", gpus, None, None, None, 1)


SHARED = [job("actor_llm_0", ["2"]), job("actor_llm_1", ["3"]), job("actor_0", []), job("finetune_0", ["3"])]


def config(**world: object) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "unused", "world": world})


@pytest.fixture(autouse=True)
def _no_daemon_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mps, "DEFAULT_PIPES", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("jobs", "world", "expected"),
    [
        (SHARED, {}, ["3"]),
        (SHARED, {"placement": "colocated"}, []),
        (SHARED[:3], {}, []),
        ([job("actor_llm_0", ["MIG-1"]), job("finetune_0", ["MIG-1"])], {}, []),
        ([job("actor_llm_0", ["0", "1"]), job("actor_llm_1", ["0", "1"])], {}, ["0", "1"]),
    ],
)
def test_a_gpu_is_shared_by_jobs_that_compute_at_the_same_time(
    jobs: list[Job], world: dict[str, object], expected: list[str]
) -> None:
    assert mps.shared_gpus(config(**world), jobs) == expected


def test_the_jobs_get_the_address_of_a_daemon_that_ends_with_the_run(tmp_path: Path) -> None:
    environ = control(tmp_path)
    with mps.shared_by_mps(config(), SHARED, environ) as found:
        folder = Path(found[mps.PIPE_KEY])
        assert folder.is_dir() and found["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert (tmp_path / "devices").read_text() == "\n"  # it sees all GPUs, as jobs name them
        assert (tmp_path / "calls").read_text().split("\n")[:3] == [
            "up",
            f"start_server -uid {os.getuid()}",
            "get_server_list",
        ]
    assert (tmp_path / "calls").read_text().endswith("quit -t 5\n")
    assert not folder.exists()


def test_its_sockets_have_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with mps.shared_by_mps(config(), SHARED, control(tmp_path)) as found:
        assert len(f"{found[mps.PIPE_KEY]}/control_lock") < 107


@pytest.mark.parametrize(
    ("start", "servers"), [("echo cannot start; exit 1", "4711"), ("true", ""), ("true", "no such user")]
)
def test_without_a_daemon_the_run_goes_on(tmp_path: Path, start: str, servers: str) -> None:
    environ = control(tmp_path, start, servers)
    with mps.shared_by_mps(config(), SHARED, environ) as found:
        assert found == environ


@pytest.mark.parametrize("why", ["off", "operators", "operators_default", "not installed", "not shared"])
def test_no_daemon_is_started_where_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    environ = control(tmp_path)
    if why == "operators":
        environ[mps.PIPE_KEY] = str(tmp_path)
    if why == "operators_default":
        monkeypatch.setattr(mps, "DEFAULT_PIPES", tmp_path)
        (tmp_path / "control").touch()
    if why == "not installed":
        environ["PATH"] = str(tmp_path)
    jobs = SHARED[:2] if why == "not shared" else SHARED
    with mps.shared_by_mps(config(mps=why != "off"), jobs, environ) as found:
        assert found == environ
    assert not (tmp_path / "calls").exists()


def test_the_daemon_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    environ = control(tmp_path)
    code = (
        "import json, sys, time\n"
        "from pipelinerl.config import RunConfig\n"
        "from pipelinerl.run import mps\n"
        "from pipelinerl.world import Job\n"
        "jobs = [Job('finetune', f'finetune_{i}', i, i, 0, '127.0.0.1', ['0'], None, None, None, 1) for i in (0, 1)]\n"
        "config = RunConfig.model_validate({'output_dir': 'unused'})\n"
        "with mps.shared_by_mps(config, jobs, json.loads(sys.argv[1])):\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )

    launcher = subprocess.Popen([sys.executable, "-c", code, json.dumps(environ)], stdout=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdout.readline() == b"up\n"
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 20
    while "quit" not in (tmp_path / "calls").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
