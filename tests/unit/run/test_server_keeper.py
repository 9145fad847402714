"""Which server is started again, when, how often, and what the run is told (no process, no clock)."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.records import PoolChange, ServerDropped, ServerReady
from pipelinerl.run.restarts import RestartBudget
from pipelinerl.run.server_keeper import ServerKeeper
from pipelinerl.world import Job

START_TIMEOUT_S = 100


def job(kind: str, idx: int) -> Job:
    return Job(kind, f"{kind}_{idx}", idx, idx, 0, "h", [], 8000 + idx, f"http://h:{8000 + idx}", 9000 + idx, 1)


class Kept:
    """A keeper of two servers and a verifier, and what it announced."""

    def __init__(self, **supervise: Any) -> None:
        config = SuperviseConfig(**{"server_restart_backoff_s": 1, "max_server_restarts": 2, **supervise})
        self.said: list[PoolChange] = []
        jobs = [job("actor_llm", 0), job("actor_llm", 1), job("verifier", 0)]
        self.keeper = ServerKeeper(jobs, config, START_TIMEOUT_S, self.said.append, 4, 0.0)
        self.changes = 0

    def ready(self, name: str, generation: int, now: float = 1.0) -> None:
        self.keeper.on_answer(ServerReady(name=name, generation=generation, version=3, time=now, incarnation=4), now)

    @property
    def events(self) -> list[tuple[str, str, int]]:
        return [(change.name, change.event, change.generation) for change in self.said]


def test_restarts_wait_twice_as_long_each_time_and_are_capped_within_the_window() -> None:
    budget = RestartBudget(cap=3, backoff_s=1, window_s=100)
    assert [budget.take(now) for now in (0, 10, 20, 30)] == [1, 2, 4, None]
    assert budget.take(101) == 4  # the first one is forgotten
    assert RestartBudget(cap=20, backoff_s=50).take(0) == 50
    long = RestartBudget(cap=20, backoff_s=50)
    assert [long.take(0) for _ in range(3)] == [50, 60, 60]


def test_a_server_that_served_is_started_again_and_is_told_about() -> None:
    kept = Kept()
    kept.ready("actor_llm_0", 0)
    assert kept.keeper.on_exit("actor_llm_0", -9, 10.0) is None
    assert kept.events == [("actor_llm_0", "down", 0)]
    assert "SIGKILL" in kept.said[0].reason
    assert kept.keeper.next_due_s(10.0) == 1.0
    assert kept.keeper.take_due(10.5) == []
    assert [server.name for server in kept.keeper.take_due(11.0)] == ["actor_llm_0"]
    kept.keeper.started("actor_llm_0", 11.0)
    assert kept.keeper.next_due_s(11.0) is None
    assert kept.events[-1] == ("actor_llm_0", "up", 1)
    assert (kept.said[-1].url, kept.said[-1].group_port, kept.said[-1].incarnation) == ("http://h:8000", 9000, 4)
    kept.ready("actor_llm_0", 1, 20.0)
    assert kept.keeper.servers["actor_llm_0"].state == "serving"


def test_the_cap_is_in_the_reason() -> None:
    kept = Kept()
    kept.ready("actor_llm_0", 0)
    for now in (10.0, 20.0):
        assert kept.keeper.on_exit("actor_llm_0", -9, now) is None
        kept.keeper.started("actor_llm_0", now + 2)
    reason = kept.keeper.on_exit("actor_llm_0", -9, 30.0)
    assert reason == (
        "ended while the run needed it (killed by SIGKILL (out of memory? see the kernel log)), "
        "after 2 restarts (supervise.max_server_restarts)"
    )
    assert kept.keeper.on_exit("actor_llm_1", -9, 30.0) is None  # each server has its own


@pytest.mark.parametrize("returncode", [0, 1, 2])
def test_what_ends_by_itself_before_it_served_is_not_tried_again(returncode: int) -> None:
    assert "ended while the run needed it" in str(Kept().keeper.on_exit("actor_llm_0", returncode, 5.0))
    assert Kept().keeper.on_exit("actor_llm_0", -9, 5.0) is None


def test_a_server_that_cannot_be_used_from_the_first_ends_the_run() -> None:
    kept = Kept()
    dropped = ServerDropped(name="actor_llm_0", generation=0, error="401", time=2.0, incarnation=4)
    trouble = kept.keeper.on_answer(dropped, 2.0)
    assert trouble is not None
    kept.keeper.give_up("actor_llm_0", trouble, 2.0)
    assert kept.keeper.on_exit("actor_llm_0", -9, 3.0) == "was dropped by the trainer: 401; it was ended"


def test_no_restarts_at_all() -> None:
    kept = Kept(max_server_restarts=0)
    kept.ready("actor_llm_0", 0)
    reason = str(kept.keeper.on_exit("actor_llm_0", -9, 5.0))
    assert "killed by SIGKILL" in reason and "restarts" not in reason
    assert not kept.keeper.may_restart("actor_llm_0", 5.0)


def test_a_verifier_is_started_again_and_nobody_is_told() -> None:
    kept = Kept()
    assert kept.keeper.on_exit("verifier_0", 1, 5.0) is None
    assert [server.name for server in kept.keeper.take_due(6.0)] == ["verifier_0"]
    kept.keeper.started("verifier_0", 6.0)
    assert kept.events == []


def test_a_server_that_the_trainer_dropped_is_ended_and_started_again() -> None:
    kept = Kept()
    kept.ready("actor_llm_0", 0)
    dropped = ServerDropped(name="actor_llm_0", generation=0, error="HTTP 500 boom", time=2.0, incarnation=4)
    trouble = kept.keeper.on_answer(dropped, 2.0)
    assert trouble == "was dropped by the trainer: HTTP 500 boom"
    kept.keeper.give_up("actor_llm_0", trouble, 2.0)
    assert kept.events == [("actor_llm_0", "down", 0)]
    assert kept.keeper.on_answer(dropped, 2.5) is None  # said once
    assert kept.keeper.on_exit("actor_llm_0", -9, 3.0) is None
    assert kept.events == [("actor_llm_0", "down", 0)]
    kept.keeper.started("actor_llm_0", 4.0)
    assert kept.keeper.on_answer(dropped, 5.0) is None  # about the start before
    assert kept.keeper.servers["actor_llm_0"].state == "starting"


def test_without_restarts_the_error_of_the_trainer_is_the_reason() -> None:
    kept = Kept(max_server_restarts=0)
    kept.keeper.give_up("actor_llm_0", "was dropped by the trainer: HTTP 500 boom", 2.0)
    assert kept.keeper.on_exit("actor_llm_0", -9, 3.0) == "was dropped by the trainer: HTTP 500 boom; it was ended"


def test_a_restarted_server_that_never_gets_weights_is_late() -> None:
    kept = Kept()
    kept.ready("actor_llm_0", 0)
    assert kept.keeper.find_late(1e9) is None  # the first start has the trainer's deadline
    kept.keeper.on_exit("actor_llm_0", -9, 10.0)
    kept.keeper.started("actor_llm_0", 11.0)
    assert kept.keeper.find_late(11.0 + START_TIMEOUT_S) is None
    assert kept.keeper.find_late(11.5 + START_TIMEOUT_S) == "actor_llm_0"
    kept.ready("actor_llm_0", 1, 50.0)
    assert kept.keeper.find_late(1e9) is None
