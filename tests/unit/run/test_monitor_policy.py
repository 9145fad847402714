"""Who counts as stuck, and which end means what."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.run.monitor import StuckMonitor
from pipelinerl.run.policy import ExitPolicy
from pipelinerl.run.waits import describe_waits
from pipelinerl.rundir.heartbeat import HeartbeatState
from pipelinerl.world import Job

CONFIG = SuperviseConfig(heartbeat_interval_s=2, heartbeat_timeout_s=20, progress_timeout_s=100)
MONITOR = StuckMonitor(CONFIG, start_timeout_s=60)


def beat(**changes: Any) -> HeartbeatState:
    return HeartbeatState(**{"pid": 5, "time": 1000.0, "progress": 0, "progress_time": 1000.0, **changes})


def test_a_stopped_run_says_what_its_processes_waited_for() -> None:
    """Long waits only; a process that gave no sign of life counts from its start."""
    started_at = {"actor_llm_0": 900.0, "actor_0": 900.0, "preprocessor_0": 1021.0, "finetune_0": 900.0}
    beats = {
        "actor_0": beat(waiting_for="samples", waiting_since=1021.0),
        "finetune_0": beat(waiting_for="servers to take the weights", waiting_since=925.0),
    }
    assert describe_waits(started_at, beats, 1050.0) == (
        "; at that time actor_llm_0 had given no sign of life for 150 s, "
        "finetune_0 had waited 125 s for servers to take the weights"
    )
    assert describe_waits(started_at, beats | {"actor_llm_0": beat(), "finetune_0": beat()}, 1050.0) == ""


@pytest.mark.parametrize(
    ("started_at", "state", "now", "expected"),
    [
        (1000.0, None, 1060.0, None),
        (1000.0, None, 1061.0, "no sign of life for 61 s"),
        (1000.0, beat(pid=4), 1061.0, "no sign of life"),  # the heartbeat of an earlier incarnation
        (900.0, beat(), 1020.0, None),
        (900.0, beat(), 1021.0, "stopped responding 21 s ago"),
        (900.0, beat(waiting_for="data", waiting_since=990.0, deadline_s=10.0, time=1004.0), 1004.0, None),
        (900.0, beat(waiting_for="data", waiting_since=990.0, deadline_s=10.0, time=1005.0), 1005.0, "waited 15 s for"),
        (900.0, beat(waiting_for="data", waiting_since=990.0, time=2000.0), 2000.0, None),
        (900.0, beat(progress=3, time=1101.0), 1101.0, "made no progress for 101 s"),
        (900.0, beat(progress=0, time=5000.0), 5000.0, None),  # a server counts nothing
    ],
)  # fmt: skip
def test_stuck(started_at: float, state: HeartbeatState | None, now: float, expected: str | None) -> None:
    reason = MONITOR.judge(5, started_at, state, now)
    assert reason is None if expected is None else expected in str(reason)


def job(kind: str, idx: int = 0) -> Job:
    return Job(kind, f"{kind}_{idx}", idx, idx, 0, "h", [], None, None, None, 1)


JOBS = [job("actor_llm"), job("actor"), job("preprocessor"), job("finetune"), job("finetune", 1)]


def test_the_run_is_finished_when_all_but_the_servers_ended_well() -> None:
    policy = ExitPolicy(JOBS, lambda: True)
    order = [JOBS[4], JOBS[3], JOBS[2], JOBS[1]]
    assert [policy.on_exit(one, 0).kind for one in order] == ["go_on", "go_on", "go_on", "finished"]


def test_a_node_above_0_does_not_end_the_run() -> None:
    policy = ExitPolicy([JOBS[0], JOBS[4]], lambda: True, ends_run=False)
    assert policy.on_exit(JOBS[4], 0).kind == "go_on" and policy.unfinished == []


def test_a_kind_is_done_when_all_its_jobs_are() -> None:
    policy = ExitPolicy(JOBS, lambda: True)
    policy.on_exit(JOBS[3], 0)
    assert not policy.is_done("finetune")
    policy.on_exit(JOBS[4], 0)
    assert policy.is_done("finetune") and not policy.is_done("actor")
    assert not policy.is_done("verifier")  # there is none


@pytest.mark.parametrize(
    ("which", "returncode", "is_complete", "kind", "reason"),
    [
        (0, 0, True, "failed", "while the run needed it"),
        (0, -9, False, "failed", "killed by SIGKILL"),
        (1, 1, True, "failed", "exit code 1"),
        (1, 0, False, "failed", "before training was complete"),
        (2, 2, False, "user_error", "refused"),
        (3, 0, False, "failed", "before training was complete"),
        (3, -15, True, "failed", "killed by SIGTERM"),
        (4, 0, False, "go_on", ""),  # a rank may end a moment before rank 0 says that training is done
        (1, -64, False, "failed", "killed by"),
    ],
)
def test_every_other_end_is_a_failure(which: int, returncode: int, is_complete: bool, kind: str, reason: str) -> None:
    verdict = ExitPolicy(JOBS, lambda: is_complete).on_exit(JOBS[which], returncode)
    assert verdict.kind == kind
    assert reason in verdict.reason
