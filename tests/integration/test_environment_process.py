"""R1 for games in a run: an actor whose games misbehave now and then goes on; they run in an environment service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.random_model import save_random_model

from pipelinerl.placement.jobs import Job, WorldMap
from pipelinerl.supervise.context import TOKEN_KEY

TASK = """
    import os

    from pipelinerl.games import GameStep, play, text_game

    def load_problems(names):
        common = {"max_turns": 2, "success_reward": 1.0}
        return [
            {"id": f"{name}{i}", "dataset": name, "number": i, **common} for name in names for i in range(8)
        ]

    @text_game
    class Game:
        def __init__(self, problem):
            self.number = problem["number"]
            self.moves = 0

        def start(self):
            return "w5 w6"

        def act(self, action):
            self.moves += 1
            if self.number == 3:
                raise ValueError("no move")
            while self.number == 5:
                pass
            # The games are not in the process of the rollouts.
            away = "rollout_worker" not in open(f"/proc/{os.getpid()}/cmdline").read()
            return GameStep("w7", 0.5 if away else -1.0, self.moves == 2)

        def close(self):
            pass

    async def generate_rollout(cfg, llm, problem, session):
        return await play(cfg, llm, problem, session, Game)
"""


def add_environment(run: ActorRun) -> str:
    """Put an environment job into the run's plan and return its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    world = WorldMap.from_json(run.files.world_file.read_bytes())
    job = Job("environment", "environment_0", 0, 0, 0, 0, "127.0.0.1", [], port, url, None, 1)
    run.files.world_file.write_text(msgspec.structs.replace(world, jobs=[*world.jobs, job]).to_json())
    return url


@contextlib.contextmanager
def environment(run: ActorRun, url: str) -> Iterator[None]:
    """Run the service until it answers, then until the end; it leaves on SIGTERM."""
    argv = [sys.executable, "-m", "pipelinerl.entrypoints.environment", "--run-dir", str(run.files.root)]
    env = {**os.environ, TOKEN_KEY: run.token, "PYTHONPATH": str(run.task_dir)}
    process = subprocess.Popen([*argv, "--job", "environment_0"], env=env)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                    assert response.status == 200
                    break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(280)
def test_r1_games_fail_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    with FakeServer() as server:
        service = {"_target_": "pipelinerl.servers.game_app.create_app", "processes": 1, "timeout_s": 3.0}
        settings = {"environment": service, "actor": {"max_failure_rate": 0.9}}
        run = ActorRun(tmp_path, model, [server.url], server.token, TASK, **settings)

        def set_version(version: int) -> None:
            server.version = str(version)

        with (
            environment(run, add_environment(run)),
            run.started(),
            CountingTrainer(run, steps=4, on_version=set_version),
        ):
            assert run.wait(200) == 0, run.stderr
    reasons = Counter(record.reason for record in run.fates if record.fate == "failed")
    assert set(reasons) & {"environment_raised", "environment_timeout"}, reasons
    samples = [sample for group in run.groups for sample in group.samples]
    assert samples and all(sample.reward == 1.0 and sample.metadata["turns"] == 2 for sample in samples)
    assert all(group.problem_id.lstrip("train") not in {"3", "5"} or not group.samples for group in run.groups)
