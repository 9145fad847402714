"""The actor process while servers die, come back and join: no rollout fails because of that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.random_model import save_random_model

from pipelinerl.records import PoolAnswer, PoolChange, ServerReady

WAIT_S = 200.0


def wait_until(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


def trains_without(server: FakeServer, versions: list[int]) -> bool:
    """Whether three more versions come while nobody asks `server` anything."""
    asked, seen = len(server.requests), len(versions)
    wait_until("training", lambda: len(versions) > seen + 2)
    return len(server.requests) == asked and server._active == 0


def change(name: str, event: str, generation: int, url: str = "") -> PoolChange:
    return PoolChange(name=name, url=url, event=event, generation=generation, time=0.0)  # type: ignore[arg-type]


def ready(name: str, generation: int) -> ServerReady:
    return ServerReady(name=name, generation=generation, version=1, time=0.0)


@pytest.mark.slow
def test_servers_leave_and_join_while_rollouts_run(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    with FakeServer(token_delay_s=0.02) as first, FakeServer(token_delay_s=0.02) as second, FakeServer() as third:
        servers = (first, second, third)
        versions: list[int] = []

        def set_version(version: int) -> None:
            versions.append(version)
            for server in servers:
                server.version = str(version)

        run = ActorRun(tmp_path, model, [first.url, second.url], first.token, max_lag=16, eval_every_n_versions=0)
        launcher = run.hub.writer("pool", "launch", PoolChange)
        trainer = run.hub.writer("pool", "finetune_0", PoolAnswer)
        with run.started(), CountingTrainer(run, steps=100_000, on_version=set_version):
            wait_until("rollouts on both servers", lambda: len(versions) > 2 and bool(first.requests))
            first.stop()
            launcher.write(change("actor_llm_0", "down", 0))
            seen = len(versions)
            wait_until("training with one server", lambda: len(versions) > seen + 2)
            launcher.write(change("joined_0", "up", 0, third.url))
            trainer.write(ready("joined_0", 0))
            wait_until("rollouts on the server that joined", lambda: len(third.requests) > 5)
            launcher.write(change("actor_llm_1", "down", 0))
            wait_until("the server that is out is left alone", lambda: trains_without(second, versions))
            asked = len(second.requests)
            launcher.write(change("actor_llm_1", "up", 1))
            trainer.write(ready("actor_llm_1", 1))
            wait_until("rollouts on the server that came back", lambda: len(second.requests) > asked)
            assert run.process is not None and run.process.poll() is None, run.stderr
    failed = [fate.reason for fate in run.fates if fate.fate == "failed"]
    assert not failed
    assert "Traceback" not in run.stderr
