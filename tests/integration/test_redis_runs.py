"""Whole runs on Redis: the server is killed in the middle of one; two share a server and a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from fakes.random_model import save_random_model
from fakes.scoring_run import ScoringServer, end_run, logs_of, start_run, wait_for_step

from pipelinerl.config.resources import RedisStreams
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer


def _redis_of(launcher: subprocess.Popen[str]) -> psutil.Process:
    (server,) = [
        child
        for child in psutil.Process(launcher.pid).children()
        if any(name in Path(child.cmdline()[0]).name for name in ("redis", "valkey"))
    ]
    return server


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_d6_a_run_continues_when_its_redis_server_is_killed(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    with ScoringServer(token_delay_s=0.01) as server:
        launcher = start_run(tmp_path, model, server, streams={"backend": "redis"}, finetune={"max_train_steps": 30})
        for step in (3, 8):
            wait_for_step(tmp_path, launcher, step)
            _redis_of(launcher).kill()
        assert end_run(launcher, 900) == 0, logs_of(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 30)
    assert "the Redis server ended with code -9; starting it again" in (tmp_path / "run" / "launch.log").read_text()
    assert _trained(tmp_path) == summary["samples_trained"]


def _trained(root: Path) -> int:
    """Samples that the audit, which has to be clean, counts as trained."""
    command = [sys.executable, "-m", "pipelinerl", "audit", str(root / "run"), "--json"]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    return int(json.loads(audit.stdout)["fates"]["trained"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_d4_two_runs_on_one_machine_and_one_redis_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_random_model(tmp_path / "model")
    steps = {"a": 6, "b": 9}
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path / "redis", RedisStreams(backend="redis")))
        monkeypatch.setenv(REDIS_URL_KEY, redis.url)
        launchers = {}
        for name, count in steps.items():
            (tmp_path / name).mkdir()
            server = stack.enter_context(ScoringServer())
            keys = {"streams": {"backend": "redis"}, "finetune": {"max_train_steps": count}}
            launchers[name] = start_run(tmp_path / name, model, server, **keys)
        for name, launcher in launchers.items():
            assert end_run(launcher, 500) == 0, logs_of(tmp_path / name)
        for name, count in steps.items():
            summary = json.loads((tmp_path / name / "run" / "summary.json").read_text())
            assert (summary["status"], summary["steps"]) == ("completed", count)
            assert _trained(tmp_path / name) == summary["samples_trained"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_l7_a_run_continues_when_its_streams_are_full(tmp_path: Path) -> None:
    """A few groups fill the streams, and generation is far ahead: the lag has no bound, nothing is dropped."""
    model = save_random_model(tmp_path / "model")
    keys = {
        "schedule": "concurrent",
        "max_lag": None,
        "pop_old_data": False,
        "preprocess": {"ring_buffer_size": 1},
        "streams": {"backend": "redis", "byte_budget": 32 * 2**10},
        "finetune": {"max_train_steps": 12},
    }
    with ScoringServer() as server:
        launcher = start_run(tmp_path, model, server, **keys)
        assert end_run(launcher, 900) == 0, logs_of(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 12)
    assert "log is full: waiting for preprocessor" in (tmp_path / "run" / "actor_0" / "stderr.log").read_text()
    assert _trained(tmp_path) == summary["samples_trained"]
