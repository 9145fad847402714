"""A real vLLM server joins a running job, works for it, and leaves it again; the run never stops."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import WholeRun, environment, make_whole_run


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
            run.wait(launcher, "the first steps", lambda: len(run.steps()) >= 2)
            since = time.time()
            assert "joined_0 serves with version" in _pool("add", server.url, str(run.output_dir), "--timeout", "280")
            run.wait(launcher, "rollouts on the server", lambda: _is_busy(run, since))
            ready = next(r for r in run.records("pool") if r.get("name") == "joined_0" and "probe_abs_diff" in r)
            assert ready["probe_abs_diff"] < 1e-3
            assert "joined_0" in _pool("list", str(run.output_dir))
            _pool("remove", server.url, str(run.output_dir))
            reached = max(run.steps())
            run.wait(launcher, "steps without it", lambda: max(run.steps()) >= reached + 3)
            launcher.terminate()
            launcher.communicate(timeout=300)
        finally:
            launcher.kill()
    assert run.summary["status"] == "interrupted"
    failed = {record["reason"] for record in run.records("fates") if record["fate"] == "failed"}
    assert not failed
    run.audit()
    assert run.living_processes() == []
