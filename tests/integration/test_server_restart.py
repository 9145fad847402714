"""Kill -9 of a server in mid run: training goes on, the server comes back with the weights, and no sample is lost."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.vllm_process import VLLMProcess
from fakes.whole_run import WholeRun, make_whole_run

#: What is promised of a process that died (docs/reliability.md).
NOTICED_S = 30.0
#: `supervise.server_restart_backoff_s` is 1 s, and what is left of the old process must be gone.
DECIDED_S = 10.0
#: Connecting, the first weights, and the comparison of log-probs with them.
JOINED_S = 20.0
#: Two starts of the same server at the same time differ by less.
SAME_START = 1.5


def _ready(run: WholeRun, name: str, generation: int) -> dict[str, Any] | None:
    answers = [r for r in run.records("pool") if r.get("type") == "server_ready" and r["name"] == name]
    return next((answer for answer in answers if answer["generation"] == generation), None)


def _worker_of(server: int) -> int:
    """The second of the workers of a parallel server."""
    for process in psutil.Process(server).children(recursive=True):
        if "Worker_TP1" in " ".join(process.cmdline()):
            return process.pid
    pytest.fail("the server has no second worker")


def _kill_and_go_on(folder: Path, overrides: list[str], **how: Any) -> None:
    """Kill a process of the only server of a run with `overrides`: the run goes on, and ends well when asked to.

    `how`: arguments of `_kill_and_await_return`.
    """
    run = make_whole_run(folder)
    launcher = run.start("finetune.max_train_steps=1000", *overrides)
    try:
        _kill_and_await_return(run, launcher, **how)
        _two_more_steps(run, launcher)
    finally:
        launcher.kill()
    _assert_a_clean_end(run)


def _two_more_steps(run: WholeRun, launcher: subprocess.Popen[str]) -> None:
    """Wait for them, and then ask the run to end."""
    reached = max(run.steps())
    run.wait(launcher, "two more steps", lambda: max(run.steps()) >= reached + 2)
    launcher.terminate()
    launcher.communicate(timeout=300)


def _assert_a_clean_end(run: WholeRun) -> None:
    assert run.summary["status"] == "interrupted"
    assert run.audit()
    assert run.living_processes() == []


def _kill_and_await_return(
    run: WholeRun,
    launcher: subprocess.Popen[str],
    victim: Callable[[int], int] = lambda server: server,
    vllm_kwargs: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """`victim` says which process of the server is killed. Returns what the trainer said of the server's return.

    How long vLLM takes to start is the machine's affair: beside it another server starts at the same moment, outside of
    the run (with `vllm_kwargs`), and tells how long that takes under this load. The rest is the product's own share.
    """
    run.wait(launcher, "the first steps", lambda: len(run.steps()) >= 2)
    psutil.Process(victim(run.process("actor_llm_0").pid)).kill()
    killed_at = time.time()
    up = run.wait(launcher, "the server's new start", lambda: _change(run, "up"))
    down = _change(run, "down")
    assert down is not None
    control = VLLMProcess(run.model_path, run.task_dir / "control.log", vllm_kwargs)
    with ThreadPoolExecutor(1) as beside:
        try:
            plain_start = beside.submit(_seconds_to_start, control)
            run.wait(launcher, "the server's first answer", lambda: _answers(up["url"]))
            answered_at = time.time()
            back = run.wait(launcher, "the server's return", lambda: _ready(run, "actor_llm_0", 1))
            plain_start_s = plain_start.result()
        finally:
            control.stop()
    ends = [r["time"] for r in run.records("trainer") if r.get("type") == "step_done" and r["time"] > down["time"]]
    longest_step_s = max((after - before for before, after in pairwise(ends)), default=0.0)
    noticed_s, decided_s = down["time"] - killed_at, up["time"] - down["time"]
    started_s, joined_s = answered_at - up["time"], back["time"] - answered_at
    print(
        f"noticed after {noticed_s:.1f} s, started {decided_s:.1f} s later, answers {started_s:.1f} s later (a server "
        f"beside: {plain_start_s:.1f} s), in use {joined_s:.1f} s later (longest step {longest_step_s:.1f} s)"
    )
    assert noticed_s < NOTICED_S and decided_s < DECIDED_S
    assert started_s < SAME_START * plain_start_s + 10
    assert joined_s < JOINED_S + 2 * longest_step_s, "it gets the weights between two steps"
    assert back["probe_abs_diff"] < 1e-3
    return back


def _change(run: WholeRun, event: str) -> dict[str, Any] | None:
    """What the launcher said of the first end, or the first new start, of the server that is killed."""
    changes = [r for r in run.records("pool") if r.get("event") == event and r["name"] == "actor_llm_0"]
    return changes[0] if changes else None


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def _seconds_to_start(server: VLLMProcess) -> float:
    started = time.monotonic()
    with server:
        return time.monotonic() - started


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_of_two_servers_is_killed(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    launcher = run.start("world.num_actor_llms=2", "finetune.max_train_steps=1000", "finetune.save_checkpoint_steps=20")
    try:
        back = _kill_and_await_return(run, launcher)
        down = next(r for r in run.records("pool") if r.get("event") == "down")
        meanwhile = [
            record["step"]
            for record in run.records("trainer")
            if record.get("type") == "step_done" and down["time"] < record["time"] < back["time"]
        ]
        assert meanwhile, "training did not go on while the server was away"
        assert back["version"] >= meanwhile[-1] - 1

        def used_again() -> bool:
            late = [row for row in run.metric_rows() if row.get("time", 0) > back["time"]]
            return any(row.get("actor/server_busy_0", 0) > 0 for row in late)

        run.wait(launcher, "rollouts on the server that came back", used_again)
        _two_more_steps(run, launcher)
    finally:
        launcher.kill()
    _assert_a_clean_end(run)
    reasons = {record["reason"] for record in run.records("fates") if record["fate"] == "failed"}
    assert not reasons, "a rollout failed because its server went away"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_only_server_is_killed_and_the_run_with_two_ranks_waits_for_it(tmp_path: Path) -> None:
    _kill_and_go_on(tmp_path, ["world.num_finetune_ranks=2"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_comes_back_to_its_base_model_gets_the_present_adapter(tmp_path: Path) -> None:
    _kill_and_go_on(tmp_path, ["finetune.lora.enabled=true", "finetune.lora.sync=adapter"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_of_a_parallel_server_is_killed(tmp_path: Path) -> None:
    """One of two workers dies: the server ends as a whole, and comes back with both."""
    parallel = {"tensor-parallel-size": 2}
    overrides = ["vllm_config.vllm_kwargs.tensor-parallel-size=2"]
    _kill_and_go_on(tmp_path, overrides, victim=_worker_of, vllm_kwargs=parallel)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_is_killed_while_it_starts(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    launcher = run.start("finetune.max_train_steps=3")
    try:
        beat = run.output_dir / "actor_llm_0" / "heartbeat.json"
        run.wait(launcher, "the server's first sign of life", beat.exists)
        run.process("actor_llm_0").kill()
        output, _ = launcher.communicate(timeout=600)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, f"{output}\n{run.logs()}"
    assert run.summary["status"] == "completed"
    assert _ready(run, "actor_llm_0", 1)
    assert run.audit()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("server_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_d1_the_trainer_is_killed_and_the_run_completes(tmp_path: Path, server_too: bool) -> None:
    """The whole run is started again by the launcher, from the trainer's last state; before that, if it was killed
    too, the server in place."""
    run, steps = make_whole_run(tmp_path), 12 if server_too else 5
    words = ("supervise.max_restarts=1", "finetune.save_checkpoint_steps=2", f"finetune.max_train_steps={steps}")
    launcher = run.start(*words)
    try:
        run.wait(launcher, "the first steps", lambda: len(run.steps()) >= 2)
        if server_too:
            run.process("actor_llm_0").kill()
            back = run.wait(launcher, "the server's return", lambda: _ready(run, "actor_llm_0", 1))
            assert back["probe_abs_diff"] < 1e-3
            reached = max(run.steps())
            run.wait(launcher, "the next step", lambda: max(run.steps()) > reached)
        run.process("finetune_0").kill()
        output, _ = launcher.communicate(timeout=500)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, f"{output}\n{run.logs()}"
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", steps, 1)
    assert "finetune_0" in summary["restart_reasons"][0]
    assert run.audit()
    assert run.living_processes() == []
