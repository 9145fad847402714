"""Where rollouts run: each on the least busy server and in the least busy worker process, with retries, and not while
weight updates pause rollouts.

A worker that dies ends the run with its exit code; its last output is in the actor's `stderr.log`, which the workers
share. A worker whose event loop is held by user code for `BLOCK_LIMIT_S` writes the stacks of its threads to its stderr
and ends; it is replaced, and its rollouts are tried again.

| who waits                  | until                                                               |
|----------------------------|---------------------------------------------------------------------|
| `Scheduler.run`            | a slot is free; then the worker answers, at most `timeout_s`        |
| a training rollout         | also until a pause is over (every schedule but `pipeline`)          |
| `Scheduler.hold_updates`   | a pause is over                                                     |
| who reads `quiet`          | a pause is requested and no rollout runs                            |
| `WorkerPool.wait_ready`    | user code and tokenizer are loaded, at most `START_TIMEOUT_S`       |
| `WorkerPool._follow`       | a worker's next message, or its end                                 |
| `WorkerPool.close`         | workers end after their socket closed, at most `_STOP_GRACE_S`      |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from msgspec.structs import replace

from pipelinerl.actor.progress import Changes
from pipelinerl.actor.worker_messages import (
    BLOCKED_EXIT_CODE,
    Answer,
    CancelRollout,
    Connection,
    Fatal,
    FromWorker,
    Ready,
    RolloutEnded,
    RolloutFailed,
    Servers,
    StartRollout,
)
from pipelinerl.errors import DomainError, WorkerError
from pipelinerl.llm.client import Fault, retry_delay_s

logger = logging.getLogger(__name__)

BLOCK_LIMIT_S = 60.0
START_TIMEOUT_S = 600.0
_STOP_GRACE_S = 5.0
#: Failure of a rollout whose server went away. It says nothing about the rollout, which runs again elsewhere.
SERVER_LOST = "server_lost"
#: Refused connections cost no try for this long: a server whose engine died refuses connections for some seconds before
#: its process ends and the launcher reports it.
REFUSALS_FORGIVEN_S = 60.0


@dataclass(eq=False)
class ServerLoad:
    """One server: its running rollouts, and times for its metrics (monotonic seconds)."""

    index: int
    usable: bool = True
    running: int = 0
    reported_at: float = field(default_factory=lambda: monotonic())
    counted_at: float = field(default_factory=lambda: monotonic())
    idle_s: float = 0.0
    rollout_s: float = 0.0

    def change_running(self, by: int) -> None:
        """Add to `running`, and account for the time until now."""
        now = monotonic()
        seconds, self.counted_at = now - self.counted_at, now
        self.rollout_s += self.running * seconds
        if not self.running:
            self.idle_s += seconds
        self.running += by

    def report(self) -> dict[str, float]:
        """Return how busy the server was since the last report."""
        self.change_running(0)
        seconds = self.counted_at - self.reported_at
        values = {
            f"actor/server_busy_{self.index}": float(self.running),  #: rollouts running on the server now
            f"actor/server_idle_s_{self.index}": self.idle_s,  #: seconds without any rollout since the last record
            #: running rollouts on average since the last record
            f"actor/server_load_{self.index}": self.rollout_s / seconds if seconds > 0 else 0.0,
        }
        self.reported_at, self.idle_s, self.rollout_s = self.counted_at, 0.0, 0.0
        return values


@dataclass(eq=False)
class _Waiter:
    slot: asyncio.Future[ServerLoad]
    evaluation: bool
    avoid: ServerLoad | None


class Scheduler:
    """Places rollouts on servers, each with `slots_per_server` slots. Lives on one event loop.

    Servers are numbered from 0 in the order in which they joined; a number is never reused.

    Args:
        num_servers: servers of the plan, all usable at first.
        timeout_s: deadline of one try; a rollout that never returns fails with `rollout_timeout`.
        max_retries: tries after the first one for transient failures, on another server if possible.
        changes: notified when a slot is free that nobody waits for, and at the end of a pause.
    """

    def __init__(
        self,
        num_servers: int,
        slots_per_server: int,
        pool: WorkerPool,
        timeout_s: float,
        max_retries: int,
        changes: Changes,
    ) -> None:
        self.servers = [ServerLoad(index) for index in range(num_servers)]
        #: Versions whose update may come now, because a pause was requested and no rollout runs.
        self.quiet: asyncio.Queue[int] = asyncio.Queue()
        self.retries = 0
        self._slots_per_server = slots_per_server
        self._pool = pool
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._changes = changes
        self._waiting: list[_Waiter] = []
        self._paused_for: int | None = None
        self._is_quiet = False
        # Training rollouts that run, and holders of updates.
        self._holds = 0

    @property
    def total_slots(self) -> int:
        """Slots of all servers, including those that are away for now."""
        return len(self.servers) * self._slots_per_server

    @property
    def has_free_slot(self) -> bool:
        """Whether a training rollout that came now would start at once."""
        return not self._waiting and self._paused_for is None and self._least_busy(None) is not None

    async def run(self, rollout: StartRollout) -> Answer:
        """Return how `rollout` ended. Failures are returned; only a broken run raises."""
        tries = refusals = 0
        refused_since: float | None = None
        server: ServerLoad | None = None
        while True:
            server = await self._acquire(rollout.evaluation, avoid=server)
            try:
                answer = await self._pool.run(replace(rollout, server=server.index), self._timeout_s)
            finally:
                self._release(server, rollout.evaluation)
            self.retries += answer.retries
            if isinstance(answer, RolloutEnded):
                return answer
            is_refused = answer.transient and answer.reason == Fault.REFUSED.value
            if is_refused and refused_since is None:
                refused_since = monotonic()
            elif not is_refused and answer.reason != Fault.CANNOT_CONNECT.value:
                refused_since = None  # the server answered
            if answer.reason == SERVER_LOST or (answer.transient and not server.usable):
                refused_since = None  # the failure says nothing about the rollout
            elif is_refused and refused_since is not None and monotonic() - refused_since < REFUSALS_FORGIVEN_S:
                if not answer.retries:
                    # The client pauses between its own retries; without any, retrying at once would spin.
                    await asyncio.sleep(retry_delay_s(refusals, 0.0))
                    refusals += 1
            elif not answer.transient or tries >= self._max_retries:
                return answer
            else:
                tries += 1
            self.retries += 1

    def add_server(self) -> int:
        """Add a server that is not usable yet, and return its number."""
        self.servers.append(ServerLoad(len(self.servers), usable=False))
        return len(self.servers) - 1

    def set_usable(self, index: int, usable: bool) -> None:
        """Set whether a server accepts rollouts. Those that run on it keep their slots."""
        self.servers[index].usable = usable
        self._assign_slots()

    def pause(self, version: int) -> None:
        """Start no training rollout until `weights_served(version)`; `quiet` gets `version` once none is running."""
        self._paused_for = version
        self._is_quiet = False
        self._check_quiet()

    def weights_served(self, version: int) -> None:
        """Note that the servers sample with `version`; this ends a pause for that version or an earlier one."""
        if self._paused_for is not None and version >= self._paused_for:
            self._paused_for = None
            self._assign_slots()
            self._changes.notify()

    @contextlib.asynccontextmanager
    async def hold_updates(self) -> AsyncIterator[None]:
        """Make pauses wait for the context to exit, as for a rollout. Waits first for a pause that has begun."""
        await self._changes.wait_for(lambda: self._paused_for is None)
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._check_quiet()

    def report(self) -> dict[str, float]:
        """Return the metrics of all servers since the last report."""
        values = {"actor/retries": float(self.retries)}  #: rollouts restarted so far
        for server in self.servers:
            values |= server.report()
        return values

    async def _acquire(self, evaluation: bool, avoid: ServerLoad | None) -> ServerLoad:
        """Wait for a slot, first come, first served; `avoid` is used only if no other server is free."""
        waiter = _Waiter(asyncio.get_running_loop().create_future(), evaluation, avoid)
        self._waiting.append(waiter)
        self._assign_slots()
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                # The slot was assigned in the same moment.
                self._release(waiter.slot.result(), evaluation)
            raise

    def _release(self, server: ServerLoad, evaluation: bool) -> None:
        server.change_running(-1)
        if not evaluation:
            self._holds -= 1
            self._check_quiet()
        self._assign_slots()

    def _assign_slots(self) -> None:
        for waiter in list(self._waiting):
            if waiter.slot.cancelled() or (self._paused_for is not None and not waiter.evaluation):
                continue
            server = self._least_busy(waiter.avoid)
            if server is None:
                break
            self._waiting.remove(waiter)
            server.change_running(1)
            self._holds += not waiter.evaluation
            waiter.slot.set_result(server)
        if self.has_free_slot:
            self._changes.notify()

    def _least_busy(self, avoid: ServerLoad | None) -> ServerLoad | None:
        free = [server for server in self.servers if server.usable and server.running < self._slots_per_server]
        others = [server for server in free if server is not avoid]
        return min(others or free, key=lambda server: server.running, default=None)

    def _check_quiet(self) -> None:
        if self._paused_for is not None and not self._holds and not self._is_quiet:
            self._is_quiet = True
            self.quiet.put_nowait(self._paused_for)


@dataclass(eq=False)
class _Pending:
    """A rollout of a worker. `sent` is False while the worker is starting."""

    server: int
    answer: asyncio.Future[Answer]
    sent: bool = False


@dataclass(eq=False)
class _Worker:
    index: int
    process: asyncio.subprocess.Process
    connection: Connection[FromWorker]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    pending: dict[int, _Pending] = field(default_factory=dict)


class WorkerPool:
    """`size` worker processes, started as `command` plus `--index I --fd N`.

    Args:
        command: argument vector of a worker, without its index and connection.
        inherited_fds: descriptors that workers inherit (the watch on the launcher).
        block_limit_s: longest time that user code may block a worker's event loop.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        inherited_fds: Sequence[int] = (),
        block_limit_s: float = BLOCK_LIMIT_S,
    ) -> None:
        self._command = [*command, "--block-limit-s", str(block_limit_s)]
        self._size = size
        self._inherited_fds = tuple(inherited_fds)
        self._workers: list[_Worker] = []
        self._servers: Servers | None = None
        self._tickets = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._closing = False
        self.replaced_workers = 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all workers. A task in `tasks` follows each of them and raises WorkerError if it dies."""
        self._tasks = tasks
        for index in range(self._size):
            await self._start_worker(index)

    async def wait_ready(self, servers: Servers) -> None:
        """Tell all workers about the servers, and wait until each has loaded the user's code."""
        self.set_servers(servers)
        for worker in self._workers:
            await worker.ready.wait()

    def set_servers(self, servers: Servers) -> None:
        """Tell all workers about the servers; they know before any rollout on a new one."""
        self._servers = servers
        for worker in self._workers:
            worker.connection.send(servers)

    def fail_rollouts_of(self, server: int) -> int:
        """Fail all rollouts of a server that is gone with `server_lost`, and return their number."""
        lost = 0
        for worker in self._workers:
            for ticket, pending in list(worker.pending.items()):
                if pending.server == server and not pending.answer.done():
                    message = f"server {server} was lost"
                    pending.answer.set_result(RolloutFailed(ticket, SERVER_LOST, message, transient=True))
                    self._cancel(worker, ticket)
                    lost += 1
        return lost

    async def run(self, start: StartRollout, timeout_s: float) -> Answer:
        """Run one rollout on the least busy worker; after `timeout_s` it has failed with `rollout_timeout`."""
        self._tickets += 1
        ticket = start.ticket = self._tickets
        worker = min(self._workers, key=lambda each: len(each.pending))
        pending = _Pending(start.server, asyncio.get_running_loop().create_future())
        worker.pending[ticket] = pending
        try:
            # The start of a replacement worker does not count.
            await worker.ready.wait()
            if not pending.answer.done():
                worker.connection.send(start)
                pending.sent = True
            async with asyncio.timeout(timeout_s):
                return await pending.answer
        except TimeoutError:
            self._cancel(worker, ticket)
            return RolloutFailed(ticket, "rollout_timeout", f"{start.rollout_id} ran for more than {timeout_s:g} s")
        except asyncio.CancelledError:
            self._cancel(worker, ticket)
            raise

    async def close(self) -> None:
        """Close the connections, which ends the workers, and kill those that do not exit."""
        self._closing = True
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            try:
                async with asyncio.timeout(_STOP_GRACE_S):
                    await worker.process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
                await worker.process.wait()

    async def _start_worker(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--index",
                str(index),
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(), *self._inherited_fds),
                stdin=asyncio.subprocess.DEVNULL,
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        worker = _Worker(index, process, Connection(reader, writer, FromWorker))
        if self._servers is not None:
            worker.connection.send(self._servers)
        self._workers.append(worker)
        assert self._tasks is not None
        self._tasks.create_task(self._follow(worker), name=f"worker-{index}")

    async def _follow(self, worker: _Worker) -> None:
        """Handle a worker's messages until it ends."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S) as start:
                while (message := await worker.connection.receive()) is not None:
                    _handle(worker, message)
                    if isinstance(message, Ready):
                        start.reschedule(None)
        except TimeoutError as error:
            raise WorkerError(f"rollout worker {worker.index} was not ready after {START_TIMEOUT_S:g} s") from error
        code = await worker.process.wait()
        if self._closing:
            return
        if code != BLOCKED_EXIT_CODE or not worker.ready.is_set():
            raise WorkerError(
                f"rollout worker {worker.index} (pid {worker.process.pid}) ended {_how(code)} with "
                f"{len(worker.pending)} rollouts running; its last output is above, in the actor's stderr.log"
            )
        logger.warning(
            "user code blocked rollout worker %d for too long (see the traceback above); the worker is replaced and "
            "%d rollouts are tried again",
            worker.index,
            len(worker.pending),
        )
        self.replaced_workers += 1
        # The replacement first, so that there always is a worker.
        await self._start_worker(worker.index)
        self._workers.remove(worker)
        for ticket, pending in worker.pending.items():
            if not pending.answer.done():
                failure = RolloutFailed(ticket, "blocked_worker", "user code blocked the worker", transient=True)
                pending.answer.set_result(failure)
        worker.pending.clear()
        worker.connection.close()

    def _cancel(self, worker: _Worker, ticket: int) -> None:
        """Cancel an abandoned rollout. It stays pending until the worker answers."""
        pending = worker.pending.get(ticket)
        if self._closing or pending is None:
            return
        if pending.sent:
            worker.connection.send(CancelRollout(ticket))
        else:
            del worker.pending[ticket]


def worker_command(run_dir: str, job: str) -> list[str]:
    """Return the argument vector of a rollout worker of this run."""
    return [sys.executable, "-m", "pipelinerl.actor.worker", "--run-dir", run_dir, "--job", job]


def _handle(worker: _Worker, message: FromWorker) -> None:
    match message:
        case RolloutEnded() | RolloutFailed():
            pending = worker.pending.pop(message.ticket, None)
            # Late answers to abandoned rollouts are ignored.
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(message)
        case Ready():
            worker.ready.set()
        case Fatal(user_error=True):
            raise DomainError(message.message)
        case Fatal():
            raise WorkerError(f"rollout worker {worker.index}: {message.message}")


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
