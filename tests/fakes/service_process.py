"""A verifier or environment service of a run as the launcher starts it: a process with a job in the run's plan."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import msgspec
from fakes.actor_run import ActorRun
from fakes.ports import free_port

from pipelinerl.role import TOKEN_KEY
from pipelinerl.world import Job, WorldMap

_START_TIMEOUT_S = 300.0


@contextlib.contextmanager
def service(run: ActorRun, kind: str) -> Iterator[str]:
    """Put a job of `kind` into the run's plan and run it until the end; it has to leave on SIGTERM.

    Yields its address, once it answers.
    """
    name = f"{kind}_0"
    url = _plan(run, kind, name)
    argv = [sys.executable, "-m", "pipelinerl.sandbox.main", "--run-dir", str(run.files.root), "--job", name]
    env = {**os.environ, TOKEN_KEY: run.token, "PYTHONPATH": str(run.task_dir)}
    process = subprocess.Popen(argv, env=env)
    try:
        _wait_healthy(process, url)
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def _plan(run: ActorRun, kind: str, name: str) -> str:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    world = WorldMap.from_json(run.files.world_file.read_bytes())
    job = Job(kind, name, 0, 0, 0, "127.0.0.1", [], port, url, None, 1)
    run.files.world_file.write_text(msgspec.structs.replace(world, jobs=[*world.jobs, job]).to_json())
    return url


def _wait_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
                assert response.status == 200
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
