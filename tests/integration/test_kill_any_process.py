"""Kill -9 of any one process of a run: it is named, the run ends non-zero in time, and nothing is left running."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from fakes.limits import PROCESS_LIMIT_S
from fakes.whole_run import WholeRun, make_whole_run

# What is promised, and within what time the first step comes on two cores that have nothing else to do.
END_S, ORPHANED_S = 30, 15
FIRST_STEP_S = 60


def _wait_for_training(run: WholeRun, launcher: subprocess.Popen[str]) -> float:
    """Return when the first step is done: from then on every process is at work.

    What is returned is how many times slower the machine is now than it should be; at least 1.
    """
    began = time.monotonic()
    run.wait(launcher, "the first step", run.steps)
    return max(1.0, (time.monotonic() - began) / FIRST_STEP_S)


def _still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended. A zombie has: its new parent only has not asked for its exit code yet."""
    _, left = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["actor_0", "preprocessor_0", "finetune_0", "actor_llm_0"])
def test_l5_a_killed_job_ends_the_run(job: str, tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    launcher = run.start("finetune.max_train_steps=1000", "supervise.max_server_restarts=0")
    try:
        slowness = _wait_for_training(run, launcher)
        run.process(job).kill()
        killed_at = time.monotonic()
        output, _ = launcher.communicate(timeout=PROCESS_LIMIT_S)
        assert time.monotonic() - killed_at < slowness * END_S
    finally:
        launcher.kill()
    assert launcher.returncode not in (0, None)
    assert job in output
    assert run.summary["status"] == "failed"
    assert job in run.summary["reason"]
    assert run.living_processes() == []


@pytest.mark.slow
def test_l9_a_killed_launcher_takes_its_children_along(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    launcher = run.start("finetune.max_train_steps=1000")
    slowness = _wait_for_training(run, launcher)
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    assert _still_running(children, timeout_s=slowness * ORPHANED_S) == []
