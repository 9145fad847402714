"""What the end of a process means: failure of the run, restart of a server, resume of the run (no process)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import FileStreams, SuperviseConfig
from pipelinerl.records import PoolChange, ServerDropped, ServerReady, TrainerMessage, TrainingDone
from pipelinerl.run.pool_command import read_state
from pipelinerl.run.processes import Outcome
from pipelinerl.run.restart import ANSWER_S, END_S, ExitPolicy, RestartBudget, ServerKeeper, can_resume
from pipelinerl.run.start import RunSession
from pipelinerl.rundir.layout import RunDir, RunIdentity
from pipelinerl.streams.base import TRAINER, TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import Job, WorldMap

START_TIMEOUT_S = 100


def job(kind: str, idx: int = 0) -> Job:
    return Job(kind, f"{kind}_{idx}", idx, idx, 0, "h", [], 8000 + idx, f"http://h:{8000 + idx}", 9000 + idx, 1)


def died(job: str, exit_code: int = 1) -> Outcome:
    return Outcome("failed", f"{job} was killed by SIGKILL.", exit_code, job)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (died("finetune_3"), True),
        (died("actor_0"), True),
        (died("preprocessor_0"), True),
        (died("actor_llm_0"), False),  # a server is restarted in place; this is the end of its cap
        (died("launch"), False),
        (died("actor_0", exit_code=2), False),
        (Outcome("interrupted", "stopped by SIGTERM", 143), False),
        (Outcome("completed", None, 0), False),
    ],
)
def test_which_ends_can_be_resumed(outcome: Outcome, expected: bool) -> None:
    assert can_resume(outcome) is expected


JOBS = [job("actor_llm"), job("actor"), job("preprocessor"), job("finetune"), job("finetune", 1)]


def test_the_run_is_finished_when_all_but_the_servers_ended_well() -> None:
    policy = ExitPolicy(JOBS, None)
    assert policy.unfinished == [job.name for job in JOBS[1:]]
    seen = [(policy.on_exit(each, 0).kind, policy.phase) for each in (JOBS[4], JOBS[3], JOBS[2], JOBS[1])]
    assert seen == [
        *(("continue", "training"), ("continue", "evaluating"), ("continue", "evaluating"), ("finished", "over"))
    ]


def test_without_ranks_training_is_done_when_others_are() -> None:
    policy = ExitPolicy(JOBS[:3], None)
    policy.on_exit(JOBS[2], 0)
    assert policy.phase == "evaluating"


@pytest.mark.parametrize(
    ("which", "returncode", "is_complete", "kind"),
    [
        (0, 0, True, "failed"),
        (0, -9, False, "failed"),
        (1, 1, True, "failed"),
        (1, 0, False, "failed"),
        (1, 0, True, "continue"),
        (2, 2, False, "user_error"),
        (3, 0, False, "failed"),
        (3, -15, True, "failed"),
        (4, 0, False, "continue"),  # a rank may end a moment before rank 0 says that training is complete
        (1, -64, False, "failed"),
    ],
)
def test_l3_every_other_end_is_a_failure(
    tmp_path: Path, which: int, returncode: int, is_complete: bool, kind: str
) -> None:
    """Training is complete when this start's trainer says so."""
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run-a")
    writer = hub.writer(TRAINER_TOPIC, TRAINER, TrainerMessage)
    writer.write(TrainingDone(version=3, time=1.0, samples_processed=9, incarnation=5 if is_complete else 4))
    writer.close()
    policy = ExitPolicy(JOBS, hub.reader(TRAINER_TOPIC, TRAINER, TrainerMessage), incarnation=5)
    verdict = policy.on_exit(JOBS[which], returncode)
    assert verdict.kind == kind and bool(verdict.reason) == (kind != "continue")


@dataclass
class Written:
    """Stands in for the stream `pool`."""

    changes: list[PoolChange] = field(default_factory=list)

    def write(self, change: PoolChange) -> None:
        self.changes.append(change)

    def flush(self) -> None:
        """Nothing is buffered."""


class Kept:
    """A keeper of two servers and a verifier, and what it announced."""

    def __init__(self, root: Path, **supervise: Any) -> None:
        changes = {"server_restart_backoff_s": 1, "max_server_restarts": 2, **supervise}
        config = RunConfig.model_validate(
            {"output_dir": "x", "supervise": changes, "vllm_config": {"start_timeout_s": START_TIMEOUT_S}}
        )
        self.said = Written()
        jobs = [job("actor_llm", 0), job("actor_llm", 1), job("verifier", 0)]
        world = WorldMap(jobs, "cpu", 1, "h", 1)
        identity = RunIdentity(run_id="r", incarnation=4)
        session = RunSession(config, world, RunDir(root), identity, [], {}, "t", SimpleQueue())
        self.keeper = ServerKeeper(session, 0.0, cast(Any, self.said))

    def ready(self, name: str, generation: int = 0, now: float = 1.0) -> None:
        self.keeper.on_answer(ServerReady(name=name, generation=generation, version=3, time=now, incarnation=4), now)

    def dropped(self, name: str, now: float, generation: int = 0) -> str | None:
        return self.keeper.on_answer(ServerDropped(name=name, generation=generation, error="401", time=now), now)

    @property
    def events(self) -> list[tuple[str, str, int]]:
        return [(change.name, change.event, change.generation) for change in self.said.changes]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def budget_of(cap: int, backoff_s: float) -> RestartBudget:
    settings = {"max_server_restarts": cap, "server_restart_backoff_s": backoff_s}
    return RestartBudget(SuperviseConfig.model_validate(settings))


def test_restarts_wait_twice_as_long_each_time_and_are_capped_within_the_window() -> None:
    budget = budget_of(3, backoff_s=1)
    assert [budget.take(now) for now in (0, 10, 20, 30)] == [1, 2, 4, None]
    assert budget.take(3601) == 4  # the first one is forgotten
    slow = budget_of(20, backoff_s=50)
    assert [slow.take(0) for _ in range(3)] == [50, 60, 60]


def test_a_server_that_served_is_restarted_and_announced(kept: Kept) -> None:
    kept.ready("actor_llm_0")
    assert kept.keeper.on_exit("actor_llm_0", -9, 10.0) is None
    assert kept.events == [("actor_llm_0", "down", 0)] and "SIGKILL" in kept.said.changes[0].reason
    assert kept.keeper.dues_s(10.0) == [1.0]
    assert kept.keeper.take_due(10.5) == []
    assert [server.name for server in kept.keeper.take_due(11.0)] == ["actor_llm_0"]
    kept.keeper.started("actor_llm_0", 11.0)
    assert kept.keeper.dues_s(11.0) == []
    assert kept.events[-1] == ("actor_llm_0", "up", 1)
    last = kept.said.changes[-1]
    assert (last.url, last.group_port, last.incarnation) == ("http://h:8000", 9000, 4)
    kept.ready("actor_llm_0", 1, 20.0)
    assert kept.keeper.servers["actor_llm_0"].state == "serving"


def test_the_cap_is_in_the_reason_and_each_server_has_its_own(kept: Kept, tmp_path: Path) -> None:
    kept.ready("actor_llm_0")
    for now in (10.0, 20.0):
        assert kept.keeper.survives_end_of("actor_llm_0", now)
        assert kept.keeper.on_exit("actor_llm_0", -9, now) is None
        kept.keeper.started("actor_llm_0", now + 2)
    assert not kept.keeper.survives_end_of("actor_llm_0", 30.0)
    reason = str(kept.keeper.on_exit("actor_llm_0", -9, 30.0))
    assert "SIGKILL" in reason and "supervise.max_server_restarts" in reason
    assert kept.keeper.on_exit("actor_llm_1", -9, 30.0) is None
    none = Kept(tmp_path, max_server_restarts=0)
    none.ready("actor_llm_0")
    assert "max_server_restarts" not in str(none.keeper.on_exit("actor_llm_0", -9, 5.0))


@pytest.mark.parametrize("returncode", [0, 1, 2])
def test_what_ends_by_itself_before_it_served_is_not_tried_again(kept: Kept, returncode: int) -> None:
    assert kept.keeper.on_exit("actor_llm_0", returncode, 5.0) is not None
    assert kept.keeper.on_exit("actor_llm_0", -9, 5.0) is None


def test_a_verifier_is_restarted_and_nobody_is_told(kept: Kept) -> None:
    assert kept.keeper.on_exit("verifier_0", 1, 5.0) is None
    assert [server.name for server in kept.keeper.take_due(6.0)] == ["verifier_0"]
    kept.keeper.started("verifier_0", 6.0)
    assert kept.events == []


@pytest.mark.parametrize("has_served", [True, False])
def test_l1_a_server_that_the_trainer_dropped(kept: Kept, has_served: bool) -> None:
    """It is ended and restarted; one that could not be used from the first ends the run, with the trainer's error."""
    if has_served:
        kept.ready("actor_llm_0")
    trouble = kept.dropped("actor_llm_0", 2.0)
    assert trouble is not None and "401" in trouble
    kept.keeper.give_up("actor_llm_0", trouble, 2.0)
    assert kept.keeper.servers["actor_llm_0"].trouble == trouble
    assert kept.dropped("actor_llm_0", 2.5) is None  # said once
    reason = kept.keeper.on_exit("actor_llm_0", -9, 3.0)
    assert kept.events == [("actor_llm_0", "down", 0)]
    if not has_served:
        assert reason is not None and reason.startswith(trouble)
        return
    assert reason is None
    kept.keeper.started("actor_llm_0", 4.0)
    assert kept.dropped("actor_llm_0", 5.0) is None  # about the start before
    assert kept.keeper.servers["actor_llm_0"].state == "starting"


def test_a_restarted_server_that_never_gets_weights_is_late(kept: Kept) -> None:
    kept.ready("actor_llm_0")
    assert kept.keeper.find_late(1e9) is None  # the first start has the trainer's deadline
    kept.keeper.on_exit("actor_llm_0", -9, 10.0)
    kept.keeper.started("actor_llm_0", 11.0)
    assert kept.keeper.find_late(11.0 + START_TIMEOUT_S) is None
    assert kept.keeper.find_late(11.5 + START_TIMEOUT_S) == "actor_llm_0"
    kept.ready("actor_llm_0", 1, 50.0)
    assert kept.keeper.find_late(1e9) is None


def test_a_server_that_is_added_serves_once_it_is_ready(kept: Kept, tmp_path: Path) -> None:
    assert kept.keeper.add("http://x:1", 1.0).name == "joined_0"
    assert kept.events == [("joined_0", "up", 0)]
    assert (kept.said.changes[0].url, kept.said.changes[0].group_port) == ("http://x:1", None)
    kept.ready("joined_0")
    states = [(server.name, server.state, server.joined, server.version) for server in read_state(RunDir(tmp_path))]
    assert states == [
        ("actor_llm_0", "starting", False, None),
        ("actor_llm_1", "starting", False, None),
        ("joined_0", "serving", True, 3),
    ]
    with pytest.raises(ValueError, match="http://x:1"):
        kept.keeper.add("http://x:1", 2.0)


def test_a_server_that_joined_and_cannot_be_used_is_tried_again_then_leaves(tmp_path: Path) -> None:
    kept = Kept(tmp_path, max_server_restarts=1)
    kept.keeper.add("http://x:1", 1.0)
    kept.keeper.lose("joined_0", str(kept.dropped("joined_0", 2.0)), 2.0)
    assert kept.keeper.take_due(2.5) == []
    assert [server.name for server in kept.keeper.take_due(3.0)] == ["joined_0"]
    kept.keeper.started("joined_0", 3.0)
    kept.keeper.lose("joined_0", str(kept.dropped("joined_0", 4.0, generation=1)), 4.0)
    assert [event for _, event, _ in kept.events] == ["up", "down", "up", "removed"]
    assert "401" in read_state(RunDir(tmp_path))[-1].trouble
    assert kept.keeper.add("http://x:1", 5.0).name == "joined_1"


def test_removing(kept: Kept) -> None:
    kept.keeper.add("http://x:1", 1.0)
    kept.keeper.remove("http://x:1", 2.0)
    assert kept.events[1:] == [("joined_0", "removed", 0)]  # what runs there may end there
    kept.keeper.remove("actor_llm_0", 3.0)
    assert kept.events[2:] == [("actor_llm_0", "down", 0), ("actor_llm_0", "removed", 0)]
    assert kept.keeper.servers["actor_llm_0"].state == "removed" and not kept.keeper.is_empty
    for name in ("actor_llm_0", "actor_llm_1"):  # it is gone; it is the last one
        with pytest.raises(ValueError):
            kept.keeper.remove(name, 4.0)


def test_the_last_evaluation_continues_while_one_server_serves(kept: Kept) -> None:
    kept.ready("actor_llm_0")
    kept.ready("actor_llm_1")
    assert not kept.keeper.can_lose("actor_llm_0")
    kept.keeper.phase = "evaluating"
    assert kept.keeper.can_lose("actor_llm_0") and not kept.keeper.can_lose("verifier_0")
    kept.keeper.give_up("actor_llm_0", "ended after training", 10.0)
    assert kept.keeper.find_unserved(1000.0) is None and kept.keeper.dues_s(1000.0) == []
    kept.keeper.give_up("actor_llm_1", "ended after training", 2000.0)
    assert kept.keeper.find_unserved(2000.0) is None, "the actor's own end may be on its way"
    assert kept.keeper.dues_s(2000.0) == [END_S]
    lost = kept.keeper.find_unserved(2000.0 + END_S)
    assert lost is not None and lost[0].name == "actor_llm_1"


def test_a_server_that_was_restarted_too_late_is_not_waited_for(kept: Kept) -> None:
    for name in ("actor_llm_0", "actor_llm_1"):
        kept.ready(name)
        assert kept.keeper.on_exit(name, -9, 5.0) is None
    kept.keeper.started("actor_llm_1", 6.0)
    kept.keeper.phase = "evaluating"
    assert kept.keeper.find_unserved(10.0) is None, "what the trainer said last of it may not be heard yet"
    assert kept.keeper.find_unserved(10.0 + ANSWER_S - 1) is None
    assert kept.keeper.find_unserved(10.0 + ANSWER_S) is not None
    assert kept.keeper.take_due(1e9) == [], "nobody would give it the weights"
    kept.ready("actor_llm_1", generation=1)
    assert kept.keeper.find_unserved(11.0 + ANSWER_S) is None


@pytest.mark.parametrize("phase", ["training", "over"])
def test_before_and_after_the_last_evaluation_no_server_is_missed(kept: Kept, phase: Any) -> None:
    kept.keeper.phase = phase
    for name in ("actor_llm_0", "actor_llm_1"):
        kept.keeper.give_up(name, "ended", 10.0)
    assert kept.keeper.find_unserved(10.0) is None and kept.keeper.find_unserved(1000.0) is None
