"""A run whose Redis server is killed in the middle goes on without a gap, and its ledger is clean at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fakes.random_model import save_random_model
from fakes.scoring_run import ScoringServer, end_run, logs_of, start_run, wait_for_step


def _redis_of(launcher: subprocess.Popen[str]) -> psutil.Process:
    (server,) = [
        child
        for child in psutil.Process(launcher.pid).children()
        if any(name in child.cmdline()[0] for name in ("redis", "valkey"))
    ]
    return server


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_d6_a_run_goes_on_when_its_redis_server_is_killed(tmp_path: Path) -> None:
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
    command = [sys.executable, "-m", "pipelinerl", "audit", str(tmp_path / "run"), "--json"]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["fates"]["trained"] == summary["samples_trained"]
