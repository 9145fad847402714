"""Starts the jobs of this node, waits for the first thing that matters, and ends every process. Used by the launcher.

Waits on one queue: ends of children (a thread per child), signals, and what the trainer says about servers. Its ticks,
while nothing happens, read the heartbeats. A server that ended or got stuck is started again in place (`ServerKeeper`
decides). Whatever the outcome, no process of the run is left when `run` returns, within about 15 s.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR
from pipelinerl.run.last_error import LogPart, last_error, user_error
from pipelinerl.run.last_evaluation import LastEvaluation
from pipelinerl.run.last_save import NO_OTHERS, OtherLaunchers, let_trainers_save
from pipelinerl.run.monitor import StuckMonitor
from pipelinerl.run.policy import ExitPolicy, Verdict
from pipelinerl.run.pool_requests import PoolReply, PoolRequest, take_requests
from pipelinerl.run.processes import (
    Child,
    ChildExited,
    Event,
    Interrupted,
    NodeEnded,
    PoolAnswered,
    StreamFailed,
    describe_exit,
    end_all,
    end_rest_of_job,
    spawn,
    wait_gone,
)
from pipelinerl.run.server_keeper import ServerKeeper
from pipelinerl.run.start import Command, child_environment
from pipelinerl.run.waits import waits_of
from pipelinerl.rundir.heartbeat import read_heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import SERVER_KINDS, Job

logger = logging.getLogger(__name__)
Status = Literal["completed", "failed", "interrupted"]
MAX_GRACE_S = 10.0
# After a failure somebody waits for the answer, and what is left has nothing to save.
MAX_GRACE_AFTER_FAILURE_S = 5.0
MIN_GRACE_S = 1.0
#: `collect_s` of a run on one node, and of one over several.
COLLECT_S = 1.0
NODES_COLLECT_S = 5.0
# From here on in the order of blame, the cause may be another death.
_UNCLEAR = 2
_STACK_DUMP_S = 3.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `job` is the one to blame, if one is; `signum` the first signal that the launcher got, also one
    that came behind a failure, which stays the reason."""

    status: Status
    reason: str | None
    exit_code: int
    job: str | None = None
    signum: int | None = None


@dataclass
class Supervisor:
    """Supervises one run on one node; `run` is called once.

    `others` hear how the run ended before its processes are ended. `collect_s`: how long the cause of a death may take
    to show; more with several nodes, where it can be the death of a process on another one.
    """

    commands: Sequence[Command]
    run_dir: RunDir
    config: SuperviseConfig
    policy: ExitPolicy
    monitor: StuckMonitor
    environ: Mapping[str, str]
    token: str
    death_fd: int
    events: SimpleQueue[Event]
    keeper: ServerKeeper
    #: Whether this is the launcher that the command `pool` talks to: of several nodes, the first.
    takes_requests: bool = True
    clock: Callable[[], float] = time.time
    others: OtherLaunchers = NO_OTHERS
    collect_s: float = COLLECT_S
    _children: dict[str, Child] = field(default_factory=dict)
    _last_tick: float = 0.0
    _is_signalled: bool = False
    #: When a server that was removed is killed, should it not have ended by then.
    _kill_at: dict[str, float] = field(default_factory=dict)
    _last_evaluation: LastEvaluation = field(init=False)

    def __post_init__(self) -> None:
        self._last_evaluation = LastEvaluation(self.policy, self.keeper)

    def run(self) -> Outcome:
        """Start everything and block until the run is over and all its processes are gone."""
        grace_s = MAX_GRACE_AFTER_FAILURE_S
        try:
            outcome = self._start() or self._watch()
            self.others.hear_outcome(outcome)
            if outcome.status == "completed":
                grace_s = MAX_GRACE_S
            elif outcome.status == "interrupted":
                grace_s = self._let_trainer_save()
        finally:
            left = self._end_everything(grace_s)
        if left:
            logger.error("processes that outlived SIGKILL: %s", left)
        return outcome

    def _start(self) -> Outcome | None:
        for command in self.commands:
            name = command.job.name
            folder = self.run_dir.job(name)
            folder.mkdir(parents=True, exist_ok=True)
            script = folder / "command.sh"
            script.write_text(command.script(), encoding="utf-8")
            script.chmod(0o755)
            outcome = self._spawn(command)
            if outcome is not None:
                return outcome
        return None

    def _spawn(self, command: Command) -> Outcome | None:
        name = command.job.name
        folder = self.run_dir.job(name)
        env = child_environment(command, self.environ, self.token, self.death_fd)
        try:
            child = spawn(name, command.argv, env, folder, self.events, (self.death_fd,))
        except OSError as error:
            return Outcome("failed", f"{name} could not be started: {error}", EXIT_RUN_FAILED, name)
        self._children[name] = child
        logger.info("started %s (pid %d), logs in %s", name, child.pid, folder)
        return None

    def _watch(self) -> Outcome:
        self._last_tick = self.clock()
        finish_by: float | None = None
        while True:
            event = self._next_event(self._tick_s(self.clock()))
            now = self.clock()
            if isinstance(event, Interrupted):
                return self._interrupted(event)
            if isinstance(event, NodeEnded):
                return Outcome(event.status, event.reason, event.exit_code)
            if isinstance(event, StreamFailed):
                return Outcome("failed", event.reason, EXIT_RUN_FAILED, "launch")
            if isinstance(event, PoolAnswered):
                self._take_answer(event, now)
            if isinstance(event, ChildExited):
                outcome = self._judge_exit(event)
                if outcome is not None:
                    return outcome
                if self.policy.has_finished_jobs and finish_by is None:
                    finish_by = now + self.config.finish_timeout_s
            if self.takes_requests:
                take_requests(self.run_dir, self._answer_request)
            self._kill_removed(now)
            outcome = self._find_unserved(now) or self._start_due_servers(now) or self._find_stuck(now)
            if outcome is not None:
                return outcome
            if finish_by is not None and now > finish_by and self.policy.unfinished:
                return self._late_finish()

    def _tick_s(self, now: float) -> float:
        """Longest wait for an event: until the next heartbeat, or until something is due."""
        dues = (self.keeper.next_due_s(now), self._last_evaluation.next_due_s(now))
        waits = [at - now for at in self._kill_at.values()] + [due_s for due_s in dues if due_s is not None]
        return min([self.config.heartbeat_interval_s, *waits])

    def _next_event(self, timeout_s: float) -> Event | None:
        try:
            return self.events.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return None

    def _interrupted(self, event: Interrupted) -> Outcome:
        self._is_signalled = True
        waits = waits_of(self._children.values(), self.run_dir, self.clock())
        return Outcome("interrupted", f"stopped by {signal.Signals(event.signum).name}{waits}", 128 + event.signum)

    def _let_trainer_save(self) -> float:
        """Returns the grace period of the others, so that all of it stays near `shutdown_grace_s`."""
        trainers = {
            name: child
            for name, child in self._children.items()
            if child.returncode is None and self._job_of(name).kind == "finetune"
        }
        grace_s = self.config.shutdown_grace_s
        save = let_trainers_save(trainers, self.others, self._next_event, grace_s, self.clock, self._is_signalled)
        return MIN_GRACE_S if save.is_cut_short else min(MAX_GRACE_AFTER_FAILURE_S, max(save.left_s, MIN_GRACE_S))

    def _judge_exit(self, event: ChildExited) -> Outcome | None:
        """The outcome of the run if this end decides it."""
        job = self._job_of(event.name)
        if job.kind in SERVER_KINDS:
            return self._judge_server_exit(job, event)
        verdict = self.policy.on_exit(job, event.returncode)
        if verdict.kind == "go_on":
            logger.info("%s is done", event.name)
            return None
        if verdict.kind == "finished":
            return Outcome("completed", None, 0)
        return self._blame(event, verdict)

    def _judge_server_exit(self, job: Job, event: ChildExited) -> Outcome | None:
        if self.keeper.is_removed(job.name):
            self._kill_at.pop(job.name, None)
            # Its helpers hold its device.
            end_rest_of_job(self._children[job.name].pid, job.name)
            return None
        if self._last_evaluation.can_lose(job):
            # Nobody is left to give a new one the weights. The others can finish what is left, what ran there, too;
            # `_find_unserved` sees when there are none.
            logger.warning("%s ended (%s) after training", job.name, describe_exit(event.returncode))
            self.keeper.give_up(job.name, f"ended ({describe_exit(event.returncode)}) after training", self.clock())
            return None
        child = self._children[job.name]
        # The others hear of it first; what is left of the server must be gone before it is started again.
        why_not = self.keeper.on_exit(job.name, event.returncode, self.clock())
        end_rest_of_job(child.pid, job.name)
        if why_not is None:
            logger.warning("%s ended.%s Its log: %s", job.name, child.last_words(), child.stderr.file)
            return None
        return self._blame(event, Verdict("failed", why_not))

    def _find_unserved(self, now: float) -> Outcome | None:
        lost = self._last_evaluation.find_lost_server(now)
        if lost is None:
            return None
        server, reason = lost
        if child := self._children.get(server.name):
            reason += f".{child.last_words()}\nIts log: {child.stderr.file}"
        return Outcome("failed", reason, EXIT_RUN_FAILED, server.name)

    def _take_answer(self, event: PoolAnswered, now: float) -> None:
        name = event.answer.name
        trouble = self.keeper.on_answer(event.answer, now)
        if trouble is None:
            return
        if self.keeper.servers[name].is_ours:
            self._end_server(name, trouble, now)
        else:
            self.keeper.lose(name, trouble, now)

    def _answer_request(self, request: PoolRequest) -> PoolReply:
        """Add or remove a server as another terminal asks."""
        now = self.clock()
        try:
            if request.action == "add":
                return PoolReply(self.keeper.add(request.server.rstrip("/"), now).name)
            server = self.keeper.remove(request.server.rstrip("/"), now)
        except ValueError as error:
            return PoolReply(None, str(error))
        logger.warning("%s (%s) was removed", server.name, server.url)
        if (child := self._children.get(server.name)) is not None and child.returncode is None:
            child.terminate()
            self._kill_at[server.name] = now + min(self.config.shutdown_grace_s, MAX_GRACE_S)
        return PoolReply(server.name)

    def _kill_removed(self, now: float) -> None:
        """End the removed servers that do not heed SIGTERM: others may wait for their devices."""
        for name in [name for name, at in self._kill_at.items() if at <= now]:
            del self._kill_at[name]
            if (child := self._children[name]).returncode is None:
                logger.warning("%s was removed and does not end: it is killed", name)
                child.kill()

    def _end_server(self, name: str, trouble: str, now: float) -> None:
        """End a server that is of no use any more; its end decides whether it is started again."""
        logger.warning("%s %s", name, trouble)
        self.keeper.give_up(name, trouble, now)
        if (child := self._children.get(name)) is not None and child.returncode is None:
            child.kill()

    def _start_due_servers(self, now: float) -> Outcome | None:
        late = self.keeper.find_late(now)
        if late is not None:
            self._end_server(late, "did not get the weights in time after its start", now)
        for server in self.keeper.take_due(now):
            if server.is_policy and self.policy.is_training_over:
                continue  # it would wait for weights that nobody sends
            if not server.is_ours:
                self.keeper.started(server.name, now)
                continue
            command = next(command for command in self.commands if command.job.name == server.name)
            outcome = self._spawn(command)
            if outcome is not None:
                return outcome
            self.keeper.started(server.name, self.clock())
        if not self.keeper.policy_servers and any(server.is_policy for server in self.keeper.servers.values()):
            return Outcome("failed", "no server is left in the pool", EXIT_RUN_FAILED)
        return None

    def _blame(self, first: ChildExited, verdict: Verdict) -> Outcome:
        """Name the job that failed. One death causes others: those that follow at once are looked at, too."""
        ends: list[tuple[ChildExited, Verdict]] = [(first, verdict)]
        node = self._collect_ends(ends)
        event, verdict = min(ends, key=self._blame_order)  # min keeps the earliest of equals
        child = self._children[event.name]
        if verdict.kind == "user_error":
            message = user_error(child.stderr)
            if message is not None:
                return Outcome("failed", f"{event.name}: {message}", EXIT_USER_ERROR, event.name)
        reason = f"{event.name} {verdict.reason}.{child.last_words()}"
        others = [f"{e.name} ({describe_exit(e.returncode)})" for e, _ in ends if e.name != event.name]
        if others:
            reason += f"\nAlso ended: {', '.join(others)}"
        reason += f"\nIts log: {child.stderr.file}"
        if node is not None:
            reason = f"{node.reason}\nOn this node: {reason}"
        return Outcome("failed", reason, EXIT_RUN_FAILED, event.name)

    def _collect_ends(self, ends: list[tuple[ChildExited, Verdict]]) -> NodeEnded | None:
        """Add the bad ends of the next moment to `ends`; the failure of another node if that may be the cause."""
        start = self.clock()
        while True:
            is_clear = any(self._blame_order(end) < _UNCLEAR for end in ends)
            left_s = start + (min(self.collect_s, COLLECT_S) if is_clear else self.collect_s) - self.clock()
            if left_s <= 0:
                return None
            event = self._next_event(left_s)
            if isinstance(event, Interrupted):
                return None  # who asks for the end does not wait for a better reason
            if isinstance(event, NodeEnded) and event.status == "failed" and not is_clear:
                return event
            if isinstance(event, ChildExited):
                verdict = self.policy.on_exit(self._job_of(event.name), event.returncode)
                if verdict.kind in ("failed", "user_error"):
                    ends.append((event, verdict))

    def _blame_order(self, end: tuple[ChildExited, Verdict]) -> int:
        """User errors first, then what was killed by a signal, then servers, then the rest."""
        event, verdict = end
        if verdict.kind == "user_error":
            return 0
        if event.returncode < 0:
            return 1
        return _UNCLEAR if self._job_of(event.name).kind in SERVER_KINDS else _UNCLEAR + 1

    def _find_stuck(self, now: float) -> Outcome | None:
        pause_s, self._last_tick = now - self._last_tick, now
        if pause_s > self.config.heartbeat_timeout_s / 2:
            logger.warning("the launcher itself was held up for %.0f s; heartbeats are judged from now on", pause_s)
            return None
        for name, child in self._children.items():
            if child.returncode is not None or self._is_ending(name):
                continue
            beat = read_heartbeat(self.run_dir.heartbeat_file(name))
            reason = self.monitor.judge(child.pid, child.started_at, beat, now)
            if reason is None:
                continue
            job = self._job_of(name)
            may_end = job.kind in SERVER_KINDS and self.keeper.may_restart(name, now)
            if may_end or self._last_evaluation.can_lose(job):
                self._end_server(name, reason, now)
                continue
            return self._blame_stuck(child, reason)
        return None

    def _is_ending(self, name: str) -> bool:
        """Whether this is a server that is being ended."""
        return name in self.keeper.servers and bool(self.keeper.servers[name].trouble)

    def _blame_stuck(self, child: Child, reason: str) -> Outcome:
        error = last_error(child.stdout, child.stderr)
        dump = LogPart(child.stderr.file, child.stderr.file.stat().st_size)
        child.dump_stacks()
        wait_gone([child.pid], _STACK_DUMP_S)
        stacks = last_error(dump)
        message = f"{child.name} {reason}. Last error: {error}\nIts threads at the end: {stacks}"
        return Outcome("failed", f"{message}\nIts log: {child.stderr.file}", EXIT_RUN_FAILED, child.name)

    def _late_finish(self) -> Outcome:
        names = ", ".join(self.policy.unfinished)
        reason = f"{names} did not end within {self.config.finish_timeout_s:.0f} s after training was complete"
        return Outcome("failed", reason, EXIT_RUN_FAILED, self.policy.unfinished[0])

    def _end_everything(self, max_grace_s: float) -> list[int]:
        pids = [child.pid for child in self._children.values()]
        return end_all(pids, min(self.config.shutdown_grace_s, max_grace_s))

    def _job_of(self, name: str) -> Job:
        return next(command.job for command in self.commands if command.job.name == name)
