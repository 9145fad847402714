"""Rollout workers as processes, without the rest of the actor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from fakes.actor_run import TASK, ActorRun
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model

import pipelinerl.actor.scheduler as pool_module
from pipelinerl.actor.scheduler import WorkerPool, worker_command
from pipelinerl.actor.worker_messages import (
    RolloutEnded,
    RolloutFailed,
    Servers,
    StartRollout,
)
from pipelinerl.errors import WorkerError

BLOCKING = TASK.replace(
    "    calls = []\n",
    """    import gc, re
    if problem["words"] == "spin":
        # Hours of backtracking, during which no other thread of the interpreter runs.
        re.match(r"(a|aa)+$", "a" * 60 + "b")
    if problem["words"] == "beside":
        await asyncio.Event().wait()  # until the worker ends
    return RolloutResult([], BaseMetrics(reward=gc.get_threshold()[0], success=gc.get_freeze_count() > 0))
""",
)


def start(words: str) -> StartRollout:
    problem = {"dataset": "test", "turns": 1, "words": words}
    return StartRollout(words, "g", problem, seed=1, evaluation=True)


def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> WorkerPool:
    model = save_random_model(tmp_path / "model")
    run = ActorRun(tmp_path, model, ["http://127.0.0.1:9"], "token", task)
    monkeypatch.setenv("PYTHONPATH", str(run.task_dir))
    return WorkerPool(worker_command(str(run.files.root), "actor_0"), 1, block_limit_s=6)


async def test_l4_a_worker_held_by_a_regular_expression_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool(tmp_path, monkeypatch, BLOCKING)
    async with asyncio.TaskGroup() as tasks:
        await pool.start(tasks)
        await pool.wait_ready(Servers(["http://127.0.0.1:9"], None))
        rollouts = [pool.run(start(words), PROCESS_LIMIT_S) for words in ("beside", "spin")]
        beside, held = await asyncio.gather(*rollouts)
        # Whoever ran beside it may be tried again, and then the new worker takes it.
        assert isinstance(beside, RolloutFailed) and beside.transient
        assert isinstance(held, RolloutFailed) and held.reason == "blocked_worker"
        ended = await pool.run(start("w5"), PROCESS_LIMIT_S)
        assert isinstance(ended, RolloutEnded)
        # Garbage collection is rare, and skips what was loaded before.
        assert (ended.summary.reward, ended.summary.success) == (20_000, True)
        assert pool.replaced_workers == 1
        await pool.close()
    errors = capfd.readouterr().err
    assert "Timeout" in errors and "my_task.py" in errors and "generate_rollout" in errors


async def test_a_worker_that_never_starts_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 0.2)
    pool = WorkerPool([sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(600)"], 1)
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.TaskGroup() as tasks:
            await pool.start(tasks)
    (error,) = ended.value.exceptions
    assert isinstance(error, WorkerError) and "was not ready after 0.2 s" in str(error)
    for worker in pool._workers:
        worker.process.kill()
    await pool.close()


async def test_a_worker_that_cannot_start_is_not_replaced_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool(["python", "-c", "raise SystemExit(1)"], 1)
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.TaskGroup() as tasks:
            await pool.start(tasks)
            await pool.wait_ready(Servers([], None))
    (error,) = ended.value.exceptions
    assert isinstance(error, WorkerError) and "ended with exit code 1" in str(error)
