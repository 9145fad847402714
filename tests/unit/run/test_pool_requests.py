"""Servers are added and removed from another terminal: requests, answers, and what the keeper makes of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records import PoolChange, ServerDropped, ServerReady
from pipelinerl.run.pool_requests import (
    PoolReply,
    PoolRequest,
    ask,
    forget_requests,
    pool_dir,
    read_state,
    take_requests,
    wait_serving,
    write_state,
)
from pipelinerl.run.server_keeper import ServerKeeper
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job

WAIT_S = 60.0


class Kept:
    """A keeper of two servers of the plan; its state is in a file."""

    def __init__(self, root: Path, **supervise: float) -> None:
        self.run_dir = RunDir(root)
        self.said: list[PoolChange] = []
        jobs = [Job("actor_llm", f"actor_llm_{i}", i, i, 0, "h", [], 1, f"http://h:{i}", 2, 1) for i in range(2)]
        self.keeper = ServerKeeper(
            jobs,
            SuperviseConfig.model_validate({"max_server_restarts": 1, "server_restart_backoff_s": 1, **supervise}),
            100,
            self.said.append,
            0,
            0.0,
            on_change=lambda keeper: write_state(self.run_dir, list(keeper.servers.values())),
        )

    @property
    def events(self) -> list[tuple[str, str, int]]:
        return [(change.name, change.event, change.generation) for change in self.said]

    def ready(self, name: str, generation: int = 0) -> None:
        self.keeper.on_answer(ServerReady(name=name, generation=generation, version=5, time=0.0), 1.0)

    def dropped(self, name: str, now: float, generation: int = 0) -> None:
        answer = ServerDropped(name=name, generation=generation, error="401", time=0.0)
        trouble = self.keeper.on_answer(answer, now)
        assert trouble is not None
        self.keeper.lose(name, trouble, now)


def test_a_server_that_is_added_is_told_about_and_serves_once_it_is_ready(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.keeper.add("http://x:1", 1.0).name == "joined_0"
    assert kept.events == [("joined_0", "up", 0)] and kept.said[0].url == "http://x:1"
    assert kept.said[0].group_port is None
    kept.ready("joined_0")
    states = {server.name: (server.state, server.joined, server.version) for server in read_state(kept.run_dir)}
    assert states == {
        "actor_llm_0": ("starting", False, None),
        "actor_llm_1": ("starting", False, None),
        "joined_0": ("serving", True, 5),
    }
    with pytest.raises(ValueError, match="one of it"):
        kept.keeper.add("http://x:1", 2.0)


def test_a_server_that_joined_and_cannot_be_used_is_tried_again_then_leaves(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keeper.add("http://x:1", 1.0)
    kept.dropped("joined_0", 2.0)
    assert kept.keeper.take_due(2.5) == []
    assert [server.name for server in kept.keeper.take_due(3.0)] == ["joined_0"]
    kept.keeper.started("joined_0", 3.0)
    kept.dropped("joined_0", 4.0, generation=1)
    assert kept.events == [
        ("joined_0", "up", 0), ("joined_0", "down", 0), ("joined_0", "up", 1), ("joined_0", "removed", 1)
    ]  # fmt: skip
    assert read_state(kept.run_dir)[-1].trouble == "was dropped by the trainer: 401"
    assert kept.keeper.add("http://x:1", 5.0).name == "joined_1"


def test_removing(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keeper.add("http://x:1", 1.0)
    kept.keeper.remove("http://x:1", 2.0)
    assert kept.events[1:] == [("joined_0", "removed", 0)]  # what runs there may end there
    kept.keeper.remove("actor_llm_0", 3.0)
    assert kept.events[2:] == [("actor_llm_0", "down", 0), ("actor_llm_0", "removed", 0)]
    assert kept.keeper.is_removed("actor_llm_0")
    with pytest.raises(ValueError, match="a run needs one"):
        kept.keeper.remove("actor_llm_1", 4.0)
    with pytest.raises(ValueError, match="actor_llm_1"):
        kept.keeper.remove("actor_llm_0", 4.0)


def test_a_command_waits_for_the_launcher_and_for_the_server(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    request = PoolRequest("add", "http://x:1")
    answers: list[str] = []

    def command() -> None:
        answers.append(ask(kept.run_dir, request, WAIT_S))
        answers.append(str(wait_serving(kept.run_dir, request, answers[0], WAIT_S).version))

    thread = threading.Thread(target=command)
    thread.start()
    while not answers:  # ticks of the launcher
        take_requests(kept.run_dir, lambda each: PoolReply(kept.keeper.add(each.server, 1.0).name))
    kept.ready("joined_0")
    thread.join(WAIT_S)
    assert answers == ["joined_0", "5"]
    assert sorted(file.name for file in pool_dir(kept.run_dir).iterdir()) == ["servers.json"]


def test_refusals_and_time_limits_are_errors_with_a_reason(tmp_path: Path) -> None:
    kept = Kept(tmp_path, max_server_restarts=0)
    request = PoolRequest("add", "http://x:1")
    with pytest.raises(ConfigError, match=r"an answer of the launcher within 0\.01 s"):
        ask(kept.run_dir, request, 0.01)
    kept.keeper.add("http://x:1", 1.0)
    with pytest.raises(ConfigError, match=r"the server to be used within 0\.01 s"):
        wait_serving(kept.run_dir, request, "joined_0", 0.01)
    kept.dropped("joined_0", 2.0)
    with pytest.raises(ConfigError, match="401"):
        wait_serving(kept.run_dir, request, "joined_0", WAIT_S)
    (pool_dir(kept.run_dir) / "a.request.json").write_text("torn")
    take_requests(kept.run_dir, lambda each: PoolReply("never"))
    assert "not a request" in (pool_dir(kept.run_dir) / "a.answer.json").read_text()
    forget_requests(kept.run_dir)
    assert sorted(file.name for file in pool_dir(kept.run_dir).iterdir()) == ["servers.json"]


def test_a_request_that_is_taken_back_meanwhile_is_no_trouble(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for name in ("a", "b"):
        (pool_dir(kept.run_dir) / f"{name}.request.json").write_text('{"action": "add", "server": "http://x:1"}')
    answered: list[PoolRequest] = []

    def answer(request: PoolRequest) -> PoolReply:
        answered.append(request)
        for file in pool_dir(kept.run_dir).glob("*.request.json"):
            file.unlink()  # both commands are interrupted
        return PoolReply("joined_0")

    take_requests(kept.run_dir, answer)
    assert len(answered) == 1
