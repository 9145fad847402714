"""Rollout workers as processes, without the rest of the actor."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fakes.actor_run import TASK, ActorRun
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model

import pipelinerl.actor.workers as pool_module
from pipelinerl.actor.worker_messages import STACKS_SIGNAL, RolloutEnded, RolloutFailed, Servers, StartRollout
from pipelinerl.actor.workers import WorkerPool, _end_with_stacks, worker_command
from pipelinerl.errors import WorkerError

BLOCKING = TASK.replace(
    "    calls = []\n",
    """    import re
    if problem["words"] == "spin":
        # Hours of backtracking, during which no other thread of the interpreter runs.
        re.match(r"(a|aa)+$", "a" * 60 + "b")
    if problem["words"] == "beside":
        await asyncio.Event().wait()  # until the worker ends
    return RolloutResult([], BaseMetrics(reward=1, success=True))
""",
)


def start(words: str) -> StartRollout:
    problem = {"dataset": "test", "turns": 1, "words": words}
    return StartRollout(0, words, "g", 0, True, 1, problem)


def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> WorkerPool:
    model = save_random_model(tmp_path / "model")
    run = ActorRun(tmp_path, model, ["http://127.0.0.1:9"], "token", task)
    monkeypatch.setenv("PYTHONPATH", str(run.task_dir))
    return WorkerPool(worker_command(str(run.files.root), "actor_0"), 1, block_limit_s=6)


async def test_a_worker_held_by_a_regular_expression_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool(tmp_path, monkeypatch, BLOCKING)
    async with asyncio.TaskGroup() as tasks:
        await pool.start(tasks)
        await pool.wait_ready(Servers([None], ["http://127.0.0.1:9"]))
        rollouts = [pool.run(start(words), PROCESS_LIMIT_S) for words in ("beside", "spin")]
        beside, held = await asyncio.gather(*rollouts)
        # Whoever ran beside it may be tried again, and then the new worker takes it.
        assert isinstance(beside, RolloutFailed) and beside.transient
        assert isinstance(held, RolloutFailed) and held.reason == "blocked_worker"
        assert isinstance(await pool.run(start("w5"), PROCESS_LIMIT_S), RolloutEnded)
        assert pool.replaced_workers == 1
        await pool.close()
    errors = capfd.readouterr().err
    assert "Timeout" in errors and "my_task.py" in errors and "generate_rollout" in errors


async def test_a_rollout_has_all_its_time_on_a_worker_that_is_slow_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the worker count as stuck, which would be replaced by one that is as slow."""
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    slow = (
        "import pathlib, time\n"
        f"started, go_on = pathlib.Path({str(started)!r}), pathlib.Path({str(go_on)!r})\n"
        "while started.exists() and not go_on.exists():\n    time.sleep(0.05)\n"
        "started.touch()\n"
    )
    pass_time = own_clock(monkeypatch)
    pool = make_pool(tmp_path, monkeypatch, slow + BLOCKING)
    async with asyncio.TaskGroup() as tasks:
        await pool.start(tasks)
        await pool.wait_ready(Servers([None], ["http://127.0.0.1:9"]))
        await pool._replace(pool._workers[0])
        (worker,) = pool._workers
        given_up, kept = (asyncio.create_task(pool.run(start("w4"), 60)) for _ in range(2))
        await pass_time(61)
        assert not kept.done() and not given_up.done() and not worker.ready.is_set()
        given_up.cancel()
        await pass_time(pool_module.CANCEL_GRACE_S + 1)
        assert not kept.done() and pool.replaced_workers == 1
        go_on.touch()
        assert isinstance(await kept, RolloutEnded) and pool.replaced_workers == 1
        await pool.close()


def own_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Awaitable[None]]:
    """Returns what lets seconds pass at once for the timers of the running loop."""
    loop = asyncio.get_running_loop()
    real, passed_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + passed_s)

    async def pass_time(seconds: float) -> None:
        nonlocal passed_s
        over = asyncio.create_task(asyncio.sleep(seconds))
        for _ in range(10):  # it, and what was started before and what that starts, have their timers
            await asyncio.sleep(0)
        passed_s += seconds
        await over  # the timers that were to end before it have

    return pass_time


async def test_a_replacement_that_never_starts_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 0.2)
    pool = WorkerPool([sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(600)"], 1)
    pool.set_servers(Servers([], []))
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.TaskGroup() as tasks:
            await pool.start(tasks)
    (error,) = ended.value.exceptions
    assert isinstance(error, WorkerError) and "was not ready after 0.2 s" in str(error)
    for worker in pool._workers:
        worker.process.kill()
    await pool.close()


async def test_a_worker_that_is_replaced_while_it_ends_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed already, and what its process ends with is no death that could end the run."""
    monkeypatch.setattr(pool_module, "_STOP_GRACE_S", 0.1)
    code = "import os, sys, time; os.close(int(sys.argv[sys.argv.index('--fd') + 1])); time.sleep(600)"
    pool = WorkerPool([sys.executable, "-c", code], 1)
    async with asyncio.timeout(PROCESS_LIMIT_S), asyncio.TaskGroup() as tasks:
        await pool.start(tasks)
        (worker,) = pool._workers
        while not worker.connection._reader.at_eof():  # noqa: ASYNC110 - it has one reader, the follower
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # now its follower waits for the process
        await pool._replace(worker)
        assert await worker.process.wait() == -STACKS_SIGNAL
        await pool.close()
    assert pool.replaced_workers == 1


async def test_a_stuck_worker_does_not_outlive_an_actor_that_ends_meanwhile() -> None:
    """The user's code took the signal that writes stacks; the actor does not wait for its grace to pass."""
    code = "import signal, sys; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and await process.stdout.readline()
    ending = asyncio.create_task(_end_with_stacks(process))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    async with asyncio.timeout(60):
        assert await process.wait() == -signal.SIGKILL


async def test_a_worker_that_cannot_start_is_not_replaced_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = WorkerPool(["python", "-c", "raise SystemExit(1)"], 1)
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.TaskGroup() as tasks:
            await pool.start(tasks)
            await pool.wait_ready(Servers([], []))
    (error,) = ended.value.exceptions
    assert isinstance(error, WorkerError) and "ended with exit code 1" in str(error)
