"""The supervisor: starts the jobs on their nodes, waits until the run is over, and ends every process.

It waits on one queue of events: exits of children (a thread per child), signals, the trainer's messages about servers,
lost nodes. Between events it reads the heartbeats. `ServerKeeper` decides whether a server that exited or got stuck is
restarted in place. No process of the run is left when `run` returns, within about 15 s of the end.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty

from pipelinerl.config.resources import SuperviseConfig
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR
from pipelinerl.records import PoolAnswer
from pipelinerl.run.last_error import LogPart, last_error, stack_note, user_error
from pipelinerl.run.node import Node
from pipelinerl.run.pool_command import PoolReply, PoolRequest, take_requests
from pipelinerl.run.preflight import DOMAIN_CHECK_TIMEOUT_S
from pipelinerl.run.processes import (
    Child,
    ChildExited,
    Event,
    Interrupted,
    NodeLost,
    Outcome,
    StreamFailed,
    describe_exit,
)
from pipelinerl.run.restart import POLICY_KIND, ExitPolicy, ExitVerdict, ServerKeeper
from pipelinerl.run.start import Command, RunSession
from pipelinerl.rundir.heartbeat import HeartbeatState
from pipelinerl.world import SERVER_KINDS, Job

logger = logging.getLogger(__name__)
MAX_GRACE_S = 10.0
#: After a failure the user waits, and the remaining processes have nothing to save.
MAX_GRACE_AFTER_FAILURE_S = 5.0
MIN_GRACE_S = 1.0
#: How long the cause of an exit may take to show, on one node and if it may be a process on another node.
COLLECT_S = 1.0
NODES_COLLECT_S = 5.0
#: A process beats before it imports anything heavy.
START_GRACE_S = 60.0
# From this place in the order of blame on, the cause may be another exit.
_UNCLEAR = 2
_STACK_DUMP_S = 3.0
# Until the next try to start a server on a node that does not answer.
_RETRY_S = 1.0
# A process that uses more than this share of a core is working; measured over this time.
_BUSY_SHARE, _BUSY_S = 0.05, 1.0
# Shorter waits are not worth reporting when a run is stopped.
_LONG_WAIT_S = 30.0


class Watched:
    """One process of a job, and what the launcher has seen of it. Times are the launcher's monotonic seconds, so
    setting the system clock has no effect.

    C code that holds the interpreter lock stops the heartbeat of a working process; its CPU time still grows.

    Attributes:
        kill_at: when a removed server is killed if it has not exited.
    """

    def __init__(self, job: Job, node: Node, child: Child) -> None:
        self.job = job
        self.node = node
        self.child = child
        self.kill_at: float | None = None
        self.beat: HeartbeatState | None = None
        self.heard_at = self.busy_at = self._seen_at = child.started_at
        self._cpu_s = 0.0

    def see(self, beat: HeartbeatState | None, cpu_s: float, now: float) -> None:
        """Note the heartbeat file and the CPU time of the process at `now`."""
        if beat is not None and beat.pid == self.child.pid and beat != self.beat:  # else it is from an earlier start
            self.beat, self.heard_at = beat, now
        if now - self._seen_at >= _BUSY_S:  # the kernel counts in steps of 10 ms
            if cpu_s - self._cpu_s > _BUSY_SHARE * (now - self._seen_at):
                self.busy_at = now
            self._cpu_s, self._seen_at = cpu_s, now

    def forgive(self, now: float) -> None:
        """Start to count silence at `now`."""
        self.heard_at = self.busy_at = self._seen_at = now

    def why_stuck(self, config: SuperviseConfig, now: float) -> str | None:
        """Why the job is stuck, completing `<job> ...`; None if it is fine.

        It is stuck if its heartbeat stopped, if it waits past the deadline that it set, or if it reports progress and
        has made none for too long.
        """
        beat, age_s = self.beat, now - self.heard_at
        is_busy = age_s <= DOMAIN_CHECK_TIMEOUT_S and now - self.busy_at <= config.heartbeat_timeout_s
        if beat is None:
            is_late = age_s > START_GRACE_S + config.heartbeat_timeout_s and not is_busy
            return f"gave no sign of life for {age_s:.0f} s after its start" if is_late else None
        waiting = f" while waiting for {beat.waiting_for}" if beat.waiting_for else ""
        if age_s > config.heartbeat_timeout_s and not is_busy:
            return f"stopped responding {age_s:.0f} s ago{waiting} (no heartbeat)"
        # The process reports its own timeout with more detail: give it a moment.
        if beat.overdue_s(age_s) > 2 * config.heartbeat_interval_s:
            waited_s = beat.overdue_s(age_s) + (beat.deadline_s or 0)
            return f"waited {waited_s:.0f} s for {beat.waiting_for} (deadline {beat.deadline_s:.0f} s)"
        idle_s = beat.idle_s + age_s
        if beat.progress > 0 and idle_s > config.progress_timeout_s:
            return f"made no progress for {idle_s:.0f} s{waiting}"
        return None


def long_waits(watched: Iterable[Watched], now: float) -> str:
    """What each living process has been waiting for, as `; at that time ...`; "" if for nothing long. It shows where a
    run hung that was stopped."""
    waits = []
    for each in watched:
        if each.child.returncode is not None:
            continue
        if (beat := each.beat) is None:
            waited_s, what = now - each.child.started_at, "had given no sign of life for {:.0f} s"
        elif beat.waited_s is None:
            continue
        else:
            waited_s, what = beat.waited_s + now - each.heard_at, f"had waited {{:.0f}} s for {beat.waiting_for}"
        if waited_s >= _LONG_WAIT_S:
            waits.append(f"{each.child.name} {what.format(waited_s)}")
    return f"; at that time {', '.join(waits)}" if waits else ""


class Supervisor:
    """Supervises the jobs of a run; `run` is called once.

    Args:
        session: what to run.
        policy: judges the ends of jobs.
        keeper: of the servers.
        nodes: where the jobs run, by rank.
    """

    def __init__(
        self, session: RunSession, policy: ExitPolicy, keeper: ServerKeeper, nodes: Mapping[int, Node]
    ) -> None:
        self._session = session
        self._config = session.config.supervise
        self._policy = policy
        self._keeper = keeper
        self._nodes = nodes
        self._watched: dict[str, Watched] = {}
        self._finish_by: float | None = None
        self._lost: list[NodeLost] = []
        self._is_signalled = False
        self._last_tick = 0.0

    def run(self) -> Outcome:
        """Start all jobs and block until the run is over and all processes are gone."""
        grace_s = MAX_GRACE_AFTER_FAILURE_S
        try:
            outcome = self._start() or self._watch()
            if outcome.status == "completed":
                grace_s = MAX_GRACE_S
            elif outcome.status == "interrupted":
                grace_s = self._let_trainers_save()
        finally:
            self._end_all(min(self._config.shutdown_grace_s, grace_s))
        return outcome

    def _end_all(self, grace_s: float) -> None:
        """End all remaining processes, on all nodes at the same time."""
        lost = {node.rank for node in self._lost}
        living = {rank: node for rank, node in self._nodes.items() if rank not in lost}
        with ThreadPoolExecutor(max_workers=max(1, len(living))) as pool:
            ends = {rank: pool.submit(node.end_all, grace_s) for rank, node in living.items()}
        for rank, end in ends.items():
            if end.exception() is not None:
                logger.error("the jobs of node %d could not be ended: %s", rank, end.exception())
            elif left := end.result():
                logger.error("processes that outlived SIGKILL on node %d: %s", rank, left)

    def _start(self) -> Outcome | None:
        for command in self._session.commands:
            script = self._session.run_dir.job(command.job.name) / "command.sh"
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(command.script(), encoding="utf-8")
            script.chmod(0o755)
            if (outcome := self._spawn(command)) is not None:
                return outcome
        return None

    def _spawn(self, command: Command) -> Outcome | None:
        name, node = command.job.name, self._nodes[command.job.node_rank]
        try:
            self._watched[name] = Watched(command.job, node, node.start(command))
        except OSError as error:
            reason = f"{name} could not be started: {error}"
            return Outcome("failed", reason, EXIT_RUN_FAILED, name, has_lost_node=not node.answers)
        pid, folder = self._watched[name].child.pid, self._session.run_dir.job(name)
        logger.info("started %s (pid %d), logs in %s", name, pid, folder)
        return None

    def _watch(self) -> Outcome:
        self._last_tick = time.monotonic()
        while True:
            event = self._next_event(self._tick_s(time.monotonic()))
            outcome = self._handle(event) or self._tend_servers() or self._find_stuck(time.monotonic())
            if outcome is not None:
                return outcome
            if self._policy.has_finished_jobs and self._finish_by is None:
                self._finish_by = time.monotonic() + self._config.finish_timeout_s
            unfinished = self._policy.unfinished
            if self._finish_by is not None and time.monotonic() > self._finish_by and unfinished:
                timeout_s, names = self._config.finish_timeout_s, ", ".join(unfinished)
                reason = f"{names} did not end within {timeout_s:.0f} s after training was complete"
                return Outcome("failed", reason, EXIT_RUN_FAILED, unfinished[0])

    def _tick_s(self, now: float) -> float:
        """How long to wait for an event: until the next heartbeat or deadline."""
        kills = [each.kill_at - now for each in self._watched.values() if each.kill_at is not None]
        return min([self._config.heartbeat_interval_s, *kills, *self._keeper.dues_s(now)])

    def _next_event(self, timeout_s: float) -> Event | None:
        try:
            return self._session.events.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return None

    def _handle(self, event: Event | None) -> Outcome | None:
        """The outcome of the run, if this event decides it."""
        if isinstance(event, Interrupted):
            self._is_signalled = event.rank is None
            waits = long_waits(self._watched.values(), time.monotonic())
            reason = f"stopped by {signal.Signals(event.signum).name}{waits}"
            return Outcome("interrupted", reason, 128 + event.signum)
        if isinstance(event, NodeLost):
            return self._lose_node(event)
        if isinstance(event, StreamFailed):
            return Outcome("failed", event.reason, EXIT_RUN_FAILED, "launch")
        if isinstance(event, PoolAnswer):
            name, trouble = event.name, self._keeper.on_answer(event, time.monotonic())
            if trouble is not None and name in self._watched:
                self._end_server(name, trouble)
            elif trouble is not None:
                self._keeper.lose(name, trouble, time.monotonic())
        if isinstance(event, ChildExited):
            return self._judge_exit(event)
        return None

    def _lose_node(self, lost: NodeLost) -> Outcome | None:
        """Policy servers on that node leave the run; any other job there ends it."""
        text = self._note_lost(lost)
        there = [each for each in self._of_node(lost.rank) if self._is_missed(each)]
        names = ", ".join(each.job.name for each in there)
        needed = [each.job.name for each in there if each.job.kind != POLICY_KIND]
        if needed:
            return Outcome("failed", f"{text}; {names} ran there", EXIT_RUN_FAILED, needed[0], has_lost_node=True)
        logger.error("%s; the run continues without %s", text, names or "it")
        for each in there:
            each.kill_at = None
            self._keeper.leave(each.job.name, text)
        return None

    def _is_missed(self, watched: Watched) -> bool:
        """Whether the run needs this job of a lost node. A server that has ended is to be started again there."""
        server = self._keeper.servers.get(watched.job.name)
        return watched.child.returncode != 0 if server is None else server.state != "removed"

    def _note_lost(self, lost: NodeLost) -> str:
        """Note that the node and its processes are gone; return a sentence that says so."""
        self._lost.append(lost)
        there = self._of_node(lost.rank)
        for each in there:
            if each.child.is_alive:
                each.child.end(-signal.SIGKILL)
        return f"node {lost.rank} ({there[0].job.host if there else 'no jobs'}) {lost.reason}"

    def _of_node(self, rank: int) -> list[Watched]:
        return [each for each in self._watched.values() if each.job.node_rank == rank]

    def _judge_exit(self, event: ChildExited) -> Outcome | None:
        job = self._watched[event.name].job
        if job.kind in SERVER_KINDS:
            return self._judge_server_exit(event)
        verdict = self._policy.on_exit(job, event.returncode)
        self._keeper.phase = self._policy.phase
        if verdict.kind == "continue":
            logger.info("%s is done", event.name)
            return None
        return Outcome("completed", None, 0) if verdict.kind == "finished" else self._blame(event, verdict)

    def _judge_server_exit(self, event: ChildExited) -> Outcome | None:
        name, watched = event.name, self._watched[event.name]
        if self._keeper.servers[name].state == "removed":
            watched.kill_at = None
            watched.node.end_rest(watched.child)  # its children hold the device
            return None
        if self._keeper.can_lose(name):
            # The trainer is gone, so a new server would get no weights. The others can finish the evaluation;
            # `find_unserved` notices when there are none.
            trouble = f"ended ({describe_exit(event.returncode)}) after training"
            logger.warning("%s %s", name, trouble)
            self._keeper.give_up(name, trouble, time.monotonic())
            return None
        # Announced first. All of its processes must be gone before it is restarted.
        why_not = self._keeper.on_exit(name, event.returncode, time.monotonic())
        watched.node.end_rest(watched.child)
        if why_not is None:
            logger.warning("%s ended.%s", name, watched.child.last_words())
            return None
        return self._blame(event, ExitVerdict("failed", why_not))

    def _tend_servers(self) -> Outcome | None:
        """Handle requests of the command `pool`, servers that are due or late, and an evaluation without a server."""
        take_requests(self._session.run_dir, self._answer_request)
        now, keeper = time.monotonic(), self._keeper
        for each in self._watched.values():
            if each.kill_at is not None and each.kill_at <= now:
                each.kill_at = None
                if each.child.is_alive:
                    logger.warning("%s was removed and has not exited: killed", each.job.name)
                    each.child.signal(signal.SIGKILL, to_group=True)
        if (lost := keeper.find_unserved(now)) is not None:
            server, reason = lost
            if watched := self._watched.get(server.name):
                reason += f".{watched.child.last_words()}"
            return Outcome("failed", reason, EXIT_RUN_FAILED, server.name)
        if (late := keeper.find_late(now)) is not None:
            self._end_server(late, "did not receive the weights in time after its start")
        for server in keeper.take_due(now):
            command = next((each for each in self._session.commands if each.job.name == server.name), None)
            if command is not None and (outcome := self._spawn(command)) is not None:
                if self._nodes[command.job.node_rank].answers:
                    return outcome
                server.due = now + _RETRY_S  # its node will answer again, or be lost
                continue
            keeper.started(server.name, time.monotonic())
        if keeper.is_empty:
            gone = [f"node {node.rank} {node.reason}" for node in self._lost]
            reason = "; ".join(["no server is left in the pool", *gone])
            return Outcome("failed", reason, EXIT_RUN_FAILED, has_lost_node=bool(gone))
        return None

    def _answer_request(self, request: PoolRequest) -> PoolReply:
        """Add or remove a server, as requested from another terminal."""
        now = time.monotonic()
        try:
            if request.action == "add":
                return PoolReply(self._keeper.add(request.server.rstrip("/"), now).name)
            server = self._keeper.remove(request.server.rstrip("/"), now)
        except ValueError as error:
            return PoolReply(None, str(error))
        logger.warning("%s (%s) was removed", server.name, server.url)
        if (watched := self._watched.get(server.name)) is not None and watched.child.is_alive:
            watched.child.signal(signal.SIGTERM)
            watched.kill_at = now + min(self._config.shutdown_grace_s, MAX_GRACE_S)
        return PoolReply(server.name)

    def _end_server(self, name: str, trouble: str) -> None:
        """End a server that cannot be used; its exit decides whether it is restarted."""
        logger.warning("%s %s", name, trouble)
        self._keeper.give_up(name, trouble, time.monotonic())
        if (watched := self._watched.get(name)) is not None and watched.child.is_alive:
            watched.child.signal(signal.SIGKILL, to_group=True)

    def _find_stuck(self, now: float) -> Outcome | None:
        pause_s, self._last_tick = now - self._last_tick, now
        if pause_s > self._config.heartbeat_timeout_s / 2:
            logger.warning("the launcher itself was suspended for %.0f s; silence is counted from now on", pause_s)
            for each in self._watched.values():
                each.forgive(now)
            return None
        for name, watched in self._watched.items():
            child, server = watched.child, self._keeper.servers.get(name)
            if not child.is_alive or (server is not None and server.trouble):  # being ended
                continue
            if not watched.node.answers:  # it will answer again, or be lost
                watched.forgive(now)
                continue
            watched.see(*watched.node.look(child), now)
            if (reason := watched.why_stuck(self._config, now)) is None:
                continue
            if self._keeper.survives_end_of(name, now):
                self._end_server(name, reason)
                continue
            error = last_error(child.stdout, child.stderr)
            dump = LogPart(child.stderr.file, child.stderr.file.stat().st_size)
            child.signal(signal.SIGABRT)
            child.ended.wait(_STACK_DUMP_S)
            message = f"{name} {reason}. Last error: {error}\n{stack_note(dump)}"
            return Outcome("failed", f"{message}\nIts log: {child.stderr.file}", EXIT_RUN_FAILED, name)
        return None

    def _blame(self, first: ChildExited, verdict: ExitVerdict) -> Outcome:
        """Name the job that failed. One exit causes others, so those that follow immediately are considered too."""
        ends: list[tuple[ChildExited, ExitVerdict]] = [(first, verdict)]
        lost = self._collect_ends(ends)
        event, verdict = min(ends, key=self._blame_order)  # min keeps the earliest of equals
        child = self._watched[event.name].child
        if verdict.kind == "user_error" and (message := user_error(child.stderr)) is not None:
            return Outcome("failed", f"{event.name}: {message}", EXIT_USER_ERROR, event.name)
        reason = f"{event.name} {verdict.reason}.{child.last_words()}"
        others = [f"{e.name} ({describe_exit(e.returncode)})" for e, _ in ends if e.name != event.name]
        if others:
            reason += f"\nAlso ended: {', '.join(others)}"
        if lost is not None:
            reason = f"{self._note_lost(lost)}\nThen: {reason}"
        return Outcome("failed", reason, EXIT_RUN_FAILED, event.name, has_lost_node=lost is not None)

    def _collect_ends(self, ends: list[tuple[ChildExited, ExitVerdict]]) -> NodeLost | None:
        """Add failures of the next moment to `ends`; return the lost node if it may be the cause."""
        started = time.monotonic()
        while True:
            is_clear = any(self._blame_order(end) < _UNCLEAR for end in ends)
            collect_s = COLLECT_S
            if len(self._nodes) > 1 and not is_clear:
                is_silent = not all(node.answers for node in self._nodes.values())
                collect_s = self._config.heartbeat_timeout_s if is_silent else NODES_COLLECT_S
            left_s = started + collect_s - time.monotonic()
            event = self._next_event(left_s) if left_s > 0 else None
            if left_s <= 0 or isinstance(event, Interrupted):
                return None  # do not make the user wait for a better reason
            if isinstance(event, NodeLost) and not is_clear:
                return event
            if isinstance(event, ChildExited):
                verdict = self._policy.on_exit(self._watched[event.name].job, event.returncode)
                if verdict.kind in ("failed", "user_error"):
                    ends.append((event, verdict))

    def _blame_order(self, end: tuple[ChildExited, ExitVerdict]) -> int:
        """User errors first, then processes killed by a signal, then servers, then the rest."""
        event, verdict = end
        if verdict.kind == "user_error":
            return 0
        if event.returncode < 0:
            return 1
        return _UNCLEAR if self._watched[event.name].job.kind in SERVER_KINDS else _UNCLEAR + 1

    def _let_trainers_save(self) -> float:
        """After a signal: ask the trainers to save, and block until they exit, time is up, or this launcher gets a
        second signal. The servers are still up, because a trainer in the middle of a step has to send them its weights.

        Returns the grace period of the other processes, so that the whole shutdown takes about `shutdown_grace_s`.
        """
        deadline = time.monotonic() + self._config.shutdown_grace_s
        trainers = [each.child for each in self._watched.values() if each.job.kind == "finetune"]
        saving = [child for child in trainers if child.is_alive]
        for child in saving:
            child.signal(signal.SIGTERM)
        while saving and (left_s := deadline - time.monotonic()) > 0:
            event = self._next_event(left_s)
            if isinstance(event, ChildExited):
                saving = [child for child in saving if child.name != event.name]
            elif isinstance(event, NodeLost):
                self._note_lost(event)
                saving = [child for child in saving if child.is_alive]
            elif isinstance(event, Interrupted) and event.rank is None:
                if self._is_signalled:
                    return MIN_GRACE_S
                self._is_signalled = True  # another node reported its signal first
        for child in saving:
            # The stacks show where it hangs, for example in a collective.
            logger.warning("%s does not exit; the stacks of its threads are in %s", child.name, child.stderr.file)
            child.signal(signal.SIGABRT)
        return min(MAX_GRACE_AFTER_FAILURE_S, max(deadline - time.monotonic(), MIN_GRACE_S))
