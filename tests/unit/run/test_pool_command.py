"""Servers are added and removed from another terminal: requests and answers as files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.run.pool_command import (
    PoolReply,
    PoolRequest,
    ServerState,
    ask,
    forget_requests,
    pool_dir,
    take_requests,
    wait_serving,
    write_state,
)
from pipelinerl.rundir.layout import RunDir

WAIT_S = 60.0
REQUEST = PoolRequest("add", "http://x:1")


def state(word: str) -> list[ServerState]:
    return [ServerState("joined_0", "http://x:1", word, 1, True, 5, "401")]  # type: ignore[arg-type]


def files(run_dir: RunDir) -> list[str]:
    return sorted(file.name for file in pool_dir(run_dir).iterdir())


def test_a_command_waits_for_the_launcher_and_for_the_server(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_state(run_dir, state("starting"))
    answers: list[str] = []

    def command() -> None:
        answers.append(ask(run_dir, REQUEST, WAIT_S))
        answers.append(str(wait_serving(run_dir, REQUEST, answers[0], WAIT_S).version))

    thread = threading.Thread(target=command)
    thread.start()
    while not answers:  # the launcher, between events
        take_requests(run_dir, lambda each: PoolReply("joined_0" if each == REQUEST else None))
    write_state(run_dir, state("serving"))
    thread.join(WAIT_S)
    assert answers == ["joined_0", "5"] and files(run_dir) == ["servers.json"]


def test_refusals_and_time_limits_are_errors_with_a_reason(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_state(run_dir, state("starting"))
    for wait in (lambda: ask(run_dir, REQUEST, 0.01), lambda: wait_serving(run_dir, REQUEST, "joined_0", 0.01)):
        with pytest.raises(ConfigError, match=r"0\.01 s"):
            wait()
    write_state(run_dir, state("removed"))
    with pytest.raises(ConfigError, match="401"):
        wait_serving(run_dir, REQUEST, "joined_0", WAIT_S)


def test_requests_that_nobody_waits_for_or_reads_are_no_trouble(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name, text in (("a", "torn"), ("b", '{"action": "add", "server": "http://x:1"}')):
        pool_dir(run_dir).mkdir(exist_ok=True)
        (pool_dir(run_dir) / f"{name}.request.json").write_text(text)
    (pool_dir(run_dir) / "gone.request.json").symlink_to("withdrawn")
    take_requests(run_dir, lambda each: PoolReply("joined_0"))
    assert files(run_dir) == ["a.answer.json", "b.answer.json", "gone.request.json"]
    assert "joined_0" not in (pool_dir(run_dir) / "a.answer.json").read_text()
    (pool_dir(run_dir) / "gone.request.json").unlink()
    forget_requests(run_dir)
    assert files(run_dir) == []
