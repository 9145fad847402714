"""The supervisor: who counts as stuck, whom a failure is blamed on, how long trainers may save (line L5)."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import MagicMock

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import SuperviseConfig
from pipelinerl.run import watch
from pipelinerl.run.last_error import LogPart
from pipelinerl.run.node import Sighting
from pipelinerl.run.processes import Child, ChildExited, Event, Interrupted, NodeLost
from pipelinerl.run.restart import ExitPolicy, ServerKeeper, can_resume
from pipelinerl.run.start import Command, RunSession
from pipelinerl.run.watch import MIN_GRACE_S, Supervisor, Watched, long_waits
from pipelinerl.rundir.heartbeat import HeartbeatState
from pipelinerl.rundir.layout import RunDir, RunIdentity
from pipelinerl.world import Job, WorldMap

CONFIG = SuperviseConfig(heartbeat_interval_s=2, heartbeat_timeout_s=20, progress_timeout_s=100)


def beat(**changes: Any) -> HeartbeatState:
    return HeartbeatState(**{"pid": 5, "time": 1000.0, **changes})


def waits(waited_s: float, deadline_s: float | None = None, what: str = "data") -> HeartbeatState:
    return beat(waiting_for=what, waited_s=waited_s, deadline_s=deadline_s)


class FakeChild(Child):
    """Notes how it is signalled."""

    def __init__(self, name: str, pid: int = 2**22, started_at: float = 0.0) -> None:
        self.asked: list[int] = []
        log = LogPart(Path("err"))
        super().__init__(name, pid, log, log, started_at, lambda signum, to_group: self.asked.append(signum))


class FakeNode:
    """A node on which jobs end as soon as they are started, `code` being how."""

    answers = True

    def __init__(self, log: Path | None = None, events: SimpleQueue[Event] | None = None) -> None:
        self.log = log
        self.events = events
        self.ended = False

    def start(self, command: Command) -> Child:
        assert self.log is not None and self.events is not None
        self.events.put(ChildExited(command.job.name, 1))
        self.events.put(Interrupted(signal.SIGTERM))
        child = FakeChild(command.job.name)
        child.stderr = LogPart(self.log)
        child.end(1)
        return child

    def look(self, child: Child) -> Sighting:
        return Sighting(None, 0.0)

    def end_rest(self, child: Child) -> None:
        """Nothing is left."""

    def end_all(self, grace_s: float) -> list[int]:
        self.ended = True
        return []


def watched(name: str = "actor_0", pid: int = 5, started_at: float = 0.0) -> Watched:
    kind, _, idx = name.rpartition("_")
    job = Job(kind, name, int(idx), int(idx), 0, "h", [], None, None, None, 1)
    return Watched(job, FakeNode(), FakeChild(name, pid, started_at))


@pytest.mark.parametrize(
    ("state", "now", "said"),
    [
        (None, 80.0, None),
        (None, 81.0, "81 s"),
        (beat(pid=4), 81.0, "81 s"),  # the heartbeat of an earlier incarnation
        (beat(), 20.0, None),
        (beat(), 21.0, "21 s"),
        (waits(14, 10), 0.0, None),
        (waits(15, 10), 0.0, "15 s for data"),
        (waits(1, 10), 14.0, "15 s for data"),
        (waits(1000), 0.0, None),
        (beat(progress=3, idle_s=99.0), 2.0, "101 s"),
        (beat(progress=0, idle_s=5000.0), 2.0, None),  # a server counts nothing
    ],
)
def test_l7_stuck(state: HeartbeatState | None, now: float, said: str | None) -> None:
    sign = watched()
    sign.see(state, 0.0, 0.0)
    sign.see(state, 0.0, now)
    reason = sign.why_stuck(CONFIG, now)
    assert reason is None if said is None else said in str(reason)


def test_x6_a_clock_that_is_set_changes_nothing() -> None:
    sign = watched()
    for now, wall in enumerate((1000.0, 1005.0, 4605.0, 4607.0, 7.0)):
        sign.see(beat(uptime_s=now, time=wall, waiting_for="data", waited_s=now, deadline_s=900), 0.0, 2.0 * now)
        assert sign.why_stuck(CONFIG, 2.0 * now) is None


@pytest.mark.parametrize(
    ("cpu_share", "ends_at", "silent_s"),
    [(0.5, 500, 302), (0.5, 100, 122), (0.01, 500, 22)],  # works to the end, for 100 s, hardly
)
def test_x6_a_process_that_works_without_a_beat_is_alive(cpu_share: float, ends_at: int, silent_s: int) -> None:
    """Code in C may hold the interpreter lock for as long as the check of the user's code allows."""
    sign = watched()
    for now in range(0, 500, 2):
        sign.see(beat(), cpu_share * min(now, ends_at), now)
        if sign.why_stuck(CONFIG, now) is not None:
            break
    assert now == silent_s
    sign.forgive(now)
    assert sign.why_stuck(CONFIG, now) is None


def test_a_stopped_run_says_what_its_processes_waited_for(tmp_path: Path) -> None:
    """Long waits only; a process that gave no sign of life counts from its start."""
    beats = {
        "actor_0": waits(29, what="samples"),
        "finetune_0": waits(125, what="servers"),
        "preprocessor_0": beat(),
        "actor_llm_0": beat(pid=4),
    }
    jobs = [watched(name, started_at=900.0) for name in (*beats, "verifier_0")]
    jobs[-1].child.returncode = 0
    for each, state in zip(jobs, beats.values(), strict=False):
        each.see(state, 0.0, 1050.0)
    text = long_waits(jobs, 1050.0)
    assert "finetune_0 had waited 125 s for servers" in text and "actor_llm_0" in text and "150 s" in text
    assert not any(name in text for name in ("actor_0 ", "preprocessor_0", "verifier_0"))
    assert long_waits(jobs[:1], 1050.0) == ""
    # A wait goes on while its process is silent.
    assert "actor_0 had waited 39 s for samples" in long_waits(jobs[:1], 1060.0)


@pytest.fixture(autouse=True)
def _files_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class SavingRun:
    """A supervisor that got a signal, or heard of one of node 1; all jobs are on node 0, or rank k on `ranks_on[k]`."""

    def __init__(
        self,
        trainers: int = 1,
        grace_s: float = 60.0,
        root: Path = Path("x"),
        ranks_on: tuple[int, ...] = (0, 0, 0),
        servers_on: tuple[int, ...] = (),
        is_signalled: bool = True,
    ) -> None:
        jobs = [
            Job("finetune", f"finetune_{i}", i, i, ranks_on[i], "h", [], None, None, None, 1) for i in range(trainers)
        ]
        jobs.append(Job("actor", "actor_0", 0, 0, 0, "h", [], None, None, None, 1))
        servers = [
            Job("actor_llm", f"actor_llm_{i}", i, 0, node, "h", [], 8080, f"http://h:{8080 + i}", 9000, 1)
            for i, node in enumerate(servers_on)
        ]
        jobs += servers
        config = RunConfig.model_validate({"output_dir": "x", "supervise": {"shutdown_grace_s": grace_s}})
        nodes = {*ranks_on, *servers_on}
        world = WorldMap(jobs, "cpu", len(nodes), "h", 1)
        self.events: SimpleQueue[Event] = SimpleQueue()
        identity = RunIdentity(run_id="r", incarnation=0)
        commands = [Command(job, ("true",), {}) for job in jobs]
        session = RunSession(config, world, RunDir(root), identity, commands, {}, "t", self.events)
        self.keeper = ServerKeeper(session, 0.0, MagicMock())
        self.nodes = {rank: FakeNode(root / "stderr.log", self.events) for rank in nodes}
        self.supervisor = Supervisor(session, ExitPolicy(jobs, None), self.keeper, self.nodes)
        self.trainers = [FakeChild(f"finetune_{i}") for i in range(trainers)]
        children = {child.name: child for child in self.trainers}
        self.supervisor._watched = {
            job.name: Watched(job, self.nodes[job.node_rank], children.get(job.name) or FakeChild(job.name))
            for job in jobs
            if job.kind != "actor"
        }
        self.grace_s = grace_s
        assert self.supervisor._handle(Interrupted(15) if is_signalled else Interrupted(15, 1)) is not None

    def wait(self, *events: Event) -> tuple[float, bool]:
        """(grace of the other processes, whether the wait ended before its time)."""
        for event in events:
            self.events.put(event)
        started = time.monotonic()
        grace_s = self.supervisor._let_trainers_save()
        return grace_s, time.monotonic() - started < self.grace_s / 2


SAVED = ChildExited("finetune_0", 143)


def test_one_node_waits_for_its_trainers_and_no_longer() -> None:
    run = SavingRun()
    assert run.wait(ChildExited("actor_0", 1), SAVED) == (watch.MAX_GRACE_AFTER_FAILURE_S, True)
    assert run.trainers[0].asked == [signal.SIGTERM]
    assert SavingRun(trainers=0).wait()[1]


def test_a_trainer_that_does_not_end_says_where_it_is_when_the_time_is_over() -> None:
    run = SavingRun(grace_s=0.1)
    assert run.wait()[0] == MIN_GRACE_S
    assert run.trainers[0].asked == [signal.SIGTERM, signal.SIGABRT]


def test_a_second_signal_does_not_wait() -> None:
    """The own signal after that of another node is not a second one: a scheduler signals all nodes."""
    assert SavingRun().wait(Interrupted(15)) == (MIN_GRACE_S, True)
    assert SavingRun(is_signalled=False).wait(Interrupted(15), SAVED)[0] > MIN_GRACE_S
    assert SavingRun(is_signalled=False).wait(Interrupted(15), Interrupted(15)) == (MIN_GRACE_S, True)
    assert SavingRun().wait(Interrupted(15, 1), Interrupted(15, 2), SAVED)[0] > MIN_GRACE_S


def test_nobody_waits_for_the_ranks_of_a_node_that_is_gone() -> None:
    run = SavingRun(trainers=2, ranks_on=(0, 1))
    assert run.wait(NodeLost(1, "is gone"), SAVED)[1]
    assert [trainer.returncode for trainer in run.trainers] == [None, -9]


@pytest.mark.parametrize("ended_before", [None, 0, -9])
@pytest.mark.parametrize(("servers_on", "goes_on"), [((0, 1), True), ((1, 1), False)])
def test_servers_of_a_node_that_is_gone_leave_a_run_that_has_others(
    servers_on: tuple[int, ...], goes_on: bool, ended_before: int | None
) -> None:
    """Also one that its node ended, and that is to be started again."""
    run = SavingRun(servers_on=servers_on)
    if ended_before is not None:
        run.keeper.servers["actor_llm_1"].has_served = True
        run.supervisor._watched["actor_llm_1"].child.returncode = ended_before
        assert run.supervisor._handle(ChildExited("actor_llm_1", ended_before)) is None
    assert run.supervisor._handle(NodeLost(1, "is gone")) is None
    outcome = run.supervisor._tend_servers()
    assert [server.state for server in run.keeper.servers.values()] == ["starting" if goes_on else "removed", "removed"]
    if goes_on:
        assert outcome is None
    else:
        assert outcome is not None and outcome.has_lost_node and can_resume(outcome)
        assert "node 1 is gone" in str(outcome.reason)


def test_a_server_is_not_started_on_a_node_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes back is known later."""
    run = SavingRun(servers_on=(0, 1))
    monkeypatch.setattr(run.nodes[1], "answers", False)
    monkeypatch.setattr(run.nodes[1], "start", MagicMock(side_effect=OSError("node 1 (h) does not answer")))
    server = run.keeper.servers["actor_llm_1"]
    server.due = 0.0
    assert run.supervisor._tend_servers() is None and server.due is not None
    monkeypatch.setattr(run.nodes[1], "answers", True)
    server.due = 0.0
    outcome = run.supervisor._tend_servers()
    assert outcome is not None and outcome.job == "actor_llm_1"


@pytest.mark.parametrize("answers", [True, False])
def test_a_run_whose_node_is_gone_before_its_jobs_are_started_is_resumed(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    run = SavingRun(servers_on=(0, 1))
    monkeypatch.setattr(run.nodes[1], "answers", answers)
    monkeypatch.setattr(run.nodes[1], "start", MagicMock(side_effect=OSError("no")))
    command = next(each for each in run.supervisor._session.commands if each.job.name == "actor_llm_1")
    outcome = run.supervisor._spawn(command)
    assert outcome is not None and can_resume(outcome) == (not answers)


def test_a_node_that_is_gone_is_named_and_not_asked_to_end_its_jobs(tmp_path: Path) -> None:
    run = SavingRun(trainers=2, ranks_on=(0, 1))
    run.supervisor._last_tick = time.monotonic()
    run.events.put(NodeLost(1, "is gone: its raylet died"))
    outcome = run.supervisor._watch()
    run.supervisor._end_all(0.0)
    assert (outcome.status, outcome.job, outcome.has_lost_node) == ("failed", "finetune_1", True)
    assert re.match(r"node 1 \(h\) .*its raylet died.*\bfinetune_1\b", str(outcome.reason))
    assert can_resume(outcome) and [node.ended for node in run.nodes.values()] == [True, False]


def test_x7_a_signal_ends_the_search_for_the_cause_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several nodes the cause may take a while to be heard of: 60 s here."""
    monkeypatch.setattr(watch, "COLLECT_S", 60.0)
    log = tmp_path / "stderr.log"
    log.write_text("Traceback (most recent call last):\n  File 'x', line 1, in y\nValueError: bad row 7\n")
    started = time.monotonic()
    outcome = SavingRun(trainers=0, root=tmp_path).supervisor.run()
    assert (outcome.status, outcome.exit_code, outcome.job) == ("failed", 1, "actor_0")
    assert "bad row 7" in str(outcome.reason) and time.monotonic() - started < 40
