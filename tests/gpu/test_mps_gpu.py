"""Servers and trainer on one GPU by MPS: a process that is killed takes nothing else with it, and nothing stays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.visible_gpus import visible_gpu
from fakes.whole_run import WholeRun, make_whole_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs an NVIDIA GPU"),
]
ONE_GPU = ("world.device=auto", "world.num_actor_llms=2", "backend=plain", "finetune.max_train_steps=100000")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WholeRun, subprocess.Popen[str]]]:
    """A run of two servers and a trainer on one GPU that has made two steps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_gpu(0))
    run = make_whole_run(tmp_path)
    launcher = run.start(*ONE_GPU)
    try:
        wait(lambda: count_updates(run) >= 3, run, launcher)
        assert mps_processes()
        yield run, launcher
    finally:
        launcher.kill()


def wait(found: Callable[[], Any], run: WholeRun, launcher: subprocess.Popen[str] | None, within_s: float = 250) -> Any:
    deadline = time.monotonic() + within_s
    while not (result := found()):
        assert launcher is None or launcher.poll() is None, run.logs()
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.2)
    return result


def updates(run: WholeRun) -> list[dict[str, Any]]:
    file = run.output_dir / "metrics.jsonl"
    return [row for row in run.metric_rows() if "weight_update/num_servers" in row] if file.exists() else []


def count_updates(run: WholeRun) -> int:
    return len(updates(run))


def mps_processes() -> list[str]:
    names = [process.info["name"] or "" for process in psutil.process_iter(["name"])]
    return [name for name in names if name.startswith("nvidia-cuda-mps")]


def processes_of(run: WholeRun) -> list[str]:
    return [str(process.pid) for process in run.living_processes()] + mps_processes()


def test_a_killed_server_comes_back_beside_one_that_goes_on(started: tuple[WholeRun, subprocess.Popen[str]]) -> None:
    run, launcher = started
    victim = next(p for p in run.living_processes() if p.cmdline()[-1] == "actor_llm_0")
    engine = [child for child in victim.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    (engine or [victim])[0].kill()
    wait(lambda: updates(run)[-1]["weight_update/num_servers"] == 1, run, launcher)
    wait(lambda: updates(run)[-1]["weight_update/num_servers"] == 2, run, launcher)
    seen = count_updates(run)
    wait(lambda: count_updates(run) > seen + 3, run, launcher)
    launcher.terminate()
    launcher.communicate(timeout=200)
    assert run.summary["status"] == "interrupted"
    differences = [row.get("weight_update/logprob_abs_diff_mean", 0.0) for row in updates(run)]
    assert max(differences) < 1e-3
    audit = [sys.executable, "-m", "pipelinerl", "audit", str(run.output_dir)]
    assert subprocess.run(audit, capture_output=True, check=False, timeout=200).returncode == 0
    wait(lambda: processes_of(run) == [], run, None, 20)


def test_nothing_of_a_killed_launcher_stays(started: tuple[WholeRun, subprocess.Popen[str]]) -> None:
    run, launcher = started
    launcher.kill()
    launcher.wait()
    wait(lambda: processes_of(run) == [], run, None, 40)
