"""A real vLLM server joins a running job, works for it, and leaves it again; the run never stops."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.limits import PROCESS_LIMIT_S
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import WholeRun, environment, make_whole_run


def _wait(run: WholeRun, launcher: subprocess.Popen[str], what: str, found: Callable[[], Any]) -> None:
    end = time.monotonic() + PROCESS_LIMIT_S
    while not found():
        assert launcher.poll() is None, f"{what}\n{run.logs()}"
        assert time.monotonic() < end, f"{what}: not within {PROCESS_LIMIT_S} s\n{run.logs()}"
        time.sleep(0.2)


def _pool(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl", "pool", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _steps(run: WholeRun) -> int:
    return max((r["step"] for r in run.records("trainer") if r.get("type") == "step_done"), default=0)


def _is_busy(run: WholeRun, since: float) -> bool:
    return any(row.get("actor/server_busy_1", 0) > 0 for row in run.metric_rows() if row.get("time", 0) > since)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_joins_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_whole_run(tmp_path)
    with VLLMProcess(run.model_path, tmp_path / "server.log", {"max_num_seqs": 16}) as server:
        monkeypatch.setenv("PIPELINERL_SERVER_TOKEN", server.token)
        launcher = run.start("finetune.max_train_steps=100000")
        try:
            _wait(run, launcher, "the first steps", lambda: _steps(run) >= 2)
            since = time.time()
            assert "joined_0 serves with version" in _pool("add", server.url, str(run.output_dir), "--timeout", "280")
            _wait(run, launcher, "rollouts on the server", lambda: _is_busy(run, since))
            ready = next(r for r in run.records("pool") if r.get("name") == "joined_0" and "probe_abs_diff" in r)
            assert ready["probe_abs_diff"] < 1e-3
            assert "joined_0" in _pool("list", str(run.output_dir))
            _pool("remove", server.url, str(run.output_dir))
            reached = _steps(run)
            _wait(run, launcher, "steps without it", lambda: _steps(run) >= reached + 3)
            launcher.terminate()
            launcher.communicate(timeout=300)
        finally:
            launcher.kill()
    assert run.summary["status"] == "interrupted"
    failed = {record["reason"] for record in run.records("fates") if record["fate"] == "failed"}
    assert not failed
    audit = [sys.executable, "-m", "pipelinerl", "audit", str(run.output_dir)]
    assert subprocess.run(audit, env=environment(), timeout=300, check=False).returncode == 0
    assert run.living_processes() == []
