"""The pool of rollout workers: processes that run the user's rollouts.

A worker that dies ends the run with its exit code; its last output is in the actor's `stderr.log`, which the workers
share. A worker whose event loop is held by user code is replaced, and its rollouts are tried again: it ends by itself
after `BLOCK_LIMIT_S`, or is ended if it does not answer the cancellation of a rollout. Either way it writes the stacks
of its threads to its stderr.

| who waits       | for                                        | at most                    |
|-----------------|--------------------------------------------|----------------------------|
| `run`           | the worker's answer                        | the rollout's time-out     |
| `wait_ready`    | user code and tokenizer to be loaded       | `START_TIMEOUT_S`          |
| `_follow`       | a worker's next message, or its end        |                            |
| `_await_cancel` | the answer to a cancellation               | `CANCEL_GRACE_S`           |
| `close`         | workers to end after their socket closed   | `_STOP_GRACE_S`, then kill |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelinerl.actor.worker_messages import (
    BLOCKED_EXIT_CODE,
    SERVER_LOST,
    STACKS_SIGNAL,
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

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0
BLOCK_LIMIT_S = 60.0
START_TIMEOUT_S = 300.0
_STOP_GRACE_S = 5.0
# A stuck worker has this long to write its stacks.
_STACKS_S = 5.0


@dataclass(eq=False)
class _Pending:
    """A rollout that was handed to a worker. `sent` is False while the worker is starting."""

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
    replaced: bool = False


class WorkerPool:
    """`size` worker processes, started as `command` plus `--index I --fd N`.

    Args:
        command: argument vector of a worker, without its index and connection.
        size: number of workers.
        inherited_fds: descriptors that workers inherit (the watch on the launcher).
        block_limit_s: longest time that user code may hold a worker's event loop.
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
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await worker.ready.wait()
            except TimeoutError as error:
                raise _not_ready(worker) from error

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
                    message = f"server {server} went away"
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
            # The time that a replaced worker takes to start is not the rollout's.
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
        """Close the connections, which ends the workers, and kill those that do not end."""
        self._closing = True
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            try:
                async with asyncio.timeout(_STOP_GRACE_S):
                    await worker.process.wait()
            except TimeoutError:
                _kill(worker)
                await worker.process.wait()

    async def _start_worker(self, index: int) -> _Worker:
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
        return worker

    async def _follow(self, worker: _Worker) -> None:
        """Handle a worker's messages until it ends."""
        # `wait_ready` watches the start of the first workers; nobody watches that of a replacement.
        limit_s = None if self._servers is None else START_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s) as start:
                while (message := await worker.connection.receive()) is not None:
                    _handle(worker, message)
                    if isinstance(message, Ready):
                        start.reschedule(None)
        except TimeoutError as error:
            raise _not_ready(worker) from error
        if self._closing or worker.replaced:
            return
        code = await worker.process.wait()
        if self._closing or worker.replaced:
            return
        if code == BLOCKED_EXIT_CODE and worker.ready.is_set():
            logger.warning(
                "user code held rollout worker %d for too long (see the traceback above); the worker is replaced and "
                "%d rollouts are tried again",
                worker.index,
                len(worker.pending),
            )
            await self._replace(worker)
            return
        raise WorkerError(
            f"rollout worker {worker.index} (pid {worker.process.pid}) ended {_how(code)} with {len(worker.pending)} "
            "rollouts running; its last output is above, in the actor's stderr.log"
        )

    def _cancel(self, worker: _Worker, ticket: int) -> None:
        """Cancel a rollout that nobody waits for any more, and replace the worker if it does not answer."""
        pending = worker.pending.get(ticket)
        if self._closing or worker.replaced or pending is None:
            return
        if not pending.sent:
            del worker.pending[ticket]
            return
        pending.answer = asyncio.get_running_loop().create_future()
        worker.connection.send(CancelRollout(ticket))
        assert self._tasks is not None
        # A task group that is ending accepts no tasks, and then the worker ends as well.
        with contextlib.suppress(RuntimeError):
            self._tasks.create_task(self._await_cancel(worker, pending.answer), name=f"cancel-{ticket}")

    async def _await_cancel(self, worker: _Worker, answer: asyncio.Future[Answer]) -> None:
        done, _ = await asyncio.wait([answer], timeout=CANCEL_GRACE_S)
        if done or worker.replaced or self._closing:
            return
        logger.warning(
            "rollout worker %d (pid %d) is stuck in user code and is replaced (see the stacks of its threads below); "
            "%d rollouts are tried again",
            worker.index,
            worker.process.pid,
            len(worker.pending) - 1,
        )
        await self._replace(worker)

    async def _replace(self, worker: _Worker) -> None:
        worker.replaced = True
        self.replaced_workers += 1
        # The new one first: there is always a worker for new rollouts.
        await self._start_worker(worker.index)
        self._workers.remove(worker)
        for ticket, pending in worker.pending.items():
            if not pending.answer.done():
                failure = RolloutFailed(ticket, "blocked_worker", "user code held the worker", transient=True)
                pending.answer.set_result(failure)
        worker.pending.clear()
        # Before its connection is closed, which could make it leave the place where it hangs.
        await _end_with_stacks(worker.process)
        worker.connection.close()


def worker_command(run_dir: str, job: str) -> list[str]:
    """Return the argument vector of a rollout worker of this run."""
    return [sys.executable, "-m", "pipelinerl.actor.worker", "--run-dir", run_dir, "--job", job]


def _handle(worker: _Worker, message: FromWorker) -> None:
    match message:
        case RolloutEnded() | RolloutFailed():
            pending = worker.pending.pop(message.ticket, None)
            # A late answer to a rollout that was given up has no effect.
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(message)
        case Ready():
            worker.ready.set()
        case Fatal(user_error=True):
            raise DomainError(message.message)
        case Fatal():
            raise WorkerError(f"rollout worker {worker.index}: {message.message}")


async def _end_with_stacks(process: asyncio.subprocess.Process) -> None:
    """End a stuck worker. The signal makes it write the stacks of its threads and end, if the user's code lets it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(STACKS_SIGNAL)
    try:
        async with asyncio.timeout(_STACKS_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        # Even if the actor ends meanwhile: nobody else knows this worker any more.
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.process.kill()


def _not_ready(worker: _Worker) -> WorkerError:
    return WorkerError(f"rollout worker {worker.index} was not ready after {START_TIMEOUT_S:g} s")


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
