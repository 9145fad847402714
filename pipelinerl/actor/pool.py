"""The actor's side of the rollout workers: starts them, hands out rollouts, replaces one that got stuck.

Called by the scheduler; waits for workers' answers. A worker that dies ends the run with its exit code (its last words
are in the actor's `stderr.log`, which the workers share). A worker in which user code holds the event loop is replaced,
and its rollouts are tried again: it ends by itself after `BLOCK_LIMIT_S`, or is ended when it does not even answer the
cancellation of a rollout. Either way it writes the stacks of its threads to its stderr.
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

import msgspec

from pipelinerl.actor.deadlines import Deadlines
from pipelinerl.actor.frames import (
    BLOCKED_EXIT_CODE,
    STACKS_SIGNAL,
    CancelRollout,
    Fatal,
    FrameReader,
    FrameWriter,
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
# How long a stuck worker may take to write its stacks.
_STACKS_S = 5.0

Answer = RolloutEnded | RolloutFailed
#: Why a rollout has failed whose server went away: it is run again elsewhere, and no try of its own is spent.
SERVER_LOST = "server_lost"


@dataclass(eq=False)
class _Worker:
    index: int
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: FrameWriter
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: dict[int, asyncio.Future[Answer | None]] = field(default_factory=dict)
    # Rollouts that it was given before it was ready, with their seconds, which begin when it is.
    early: dict[int, tuple[asyncio.Future[Answer | None], float]] = field(default_factory=dict)
    replaced: bool = False


class WorkerPool:
    """`size` worker processes started by `command` plus `--index I --fd N`.

    Args:
        command: argument vector of a worker, without its index and connection.
        size: number of workers.
        inherited_fds: descriptors that workers inherit (the watch on the launcher).
        block_limit_s: how long user code may hold a worker's event loop.
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
        self._next_ticket = 0
        # Rollouts by the server that they are on: (worker, ticket).
        self._on_server: dict[int, set[tuple[_Worker, int]]] = {}
        self._deadlines = Deadlines()
        self._tasks: asyncio.TaskGroup | None = None
        self._closing = False
        self.replaced_workers = 0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all workers; each is followed by a task in `tasks`, where a dead worker raises WorkerError."""
        self._tasks = tasks
        for index in range(self._size):
            await self._start_worker(index)

    async def wait_ready(self, servers: Servers) -> None:
        """Wait until every worker has loaded the user's code, and tell all about the servers."""
        self._servers = servers
        for worker in self._workers:
            worker.writer.write(servers)
        for worker in self._workers:
            await self._wait_ready(worker)

    def set_servers(self, servers: Servers) -> None:
        """Tell all workers that there are more servers now; they hear it before any rollout on one of them."""
        self._servers = servers
        for worker in self._workers:
            worker.writer.write(servers)

    def give_up_server(self, server: int) -> int:
        """The server is gone: its rollouts fail with `server_lost` now; returns how many there were."""
        lost = self._on_server.pop(server, set())
        for worker, ticket in lost:
            answer = worker.waiting.get(ticket)
            if answer is None or answer.done():
                continue
            answer.set_result(RolloutFailed(ticket, SERVER_LOST, f"server {server} went away", transient=True))
            self._cancel(worker, ticket)
        return len(lost)

    async def run(self, start: StartRollout, timeout_s: float) -> Answer:
        """Run one rollout on the least busy worker; after `timeout_s` it has failed with `rollout_timeout`.

        What a worker that replaces another one takes to start does not count.
        """
        self._next_ticket += 1
        start.ticket = self._next_ticket
        worker = min(self._workers, key=lambda each: len(each.waiting))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer | None] = loop.create_future()
        worker.waiting[start.ticket] = answer
        worker.writer.write(start)
        place = (worker, start.ticket)
        self._on_server.setdefault(start.server, set()).add(place)
        # A shared timer and a future rather than asyncio.timeout and shield: this is done for every rollout.
        if worker.ready.is_set():
            self._deadlines.watch(start.ticket, answer, timeout_s)
        else:
            worker.early[start.ticket] = (answer, timeout_s)
        try:
            result = await answer
        except asyncio.CancelledError:
            self._cancel(worker, start.ticket)
            raise
        finally:
            self._deadlines.forget(start.ticket)
            worker.early.pop(start.ticket, None)
            self._on_server.get(start.server, set()).discard(place)
        if result is None:
            self._cancel(worker, start.ticket)
            return RolloutFailed(start.ticket, "rollout_timeout", f"{start.rollout_id} took more than {timeout_s:g} s")
        return result

    async def close(self) -> None:
        """Close the connections, which ends the workers; kill those that do not end."""
        self._closing = True
        self._deadlines.close()
        for worker in self._workers:
            worker.writer.close()
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
        worker = _Worker(index=index, process=process, reader=reader, writer=FrameWriter(writer))
        if self._servers is not None:
            worker.writer.write(self._servers)
        self._workers.append(worker)
        assert self._tasks is not None
        self._tasks.create_task(self._follow(worker), name=f"worker-{index}")
        return worker

    async def _wait_ready(self, worker: _Worker) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.ready.wait()
        except TimeoutError as error:
            raise _not_ready(worker) from error

    async def _follow(self, worker: _Worker) -> None:
        """Take a worker's answers until it ends."""
        frames = FrameReader(worker.reader, msgspec.msgpack.Decoder(FromWorker))
        # Nobody else waits for one that replaces another.
        limit_s = None if self._servers is None else START_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s) as start:
                while (messages := await frames.read()) is not None:
                    for message in messages:
                        _take(worker, message)
                        if isinstance(message, Ready):
                            start.reschedule(None)
                            self._begin_early(worker)
        except TimeoutError as error:
            raise _not_ready(worker) from error
        if self._closing or worker.replaced:
            return
        code = await worker.process.wait()
        if self._closing or worker.replaced:  # by now
            return
        if code == BLOCKED_EXIT_CODE and worker.ready.is_set():
            logger.warning(
                "user code held rollout worker %d for too long (where: see the traceback above); it is replaced, and "
                "%d rollouts are tried again",
                worker.index,
                len(worker.waiting),
            )
            await self._replace(worker)
            return
        raise WorkerError(
            f"rollout worker {worker.index} (pid {worker.process.pid}) ended {_how(code)} with "
            f"{len(worker.waiting)} rollouts running. Its last words are above, in the actor's stderr.log"
        )

    def _begin_early(self, worker: _Worker) -> None:
        for ticket, (answer, timeout_s) in worker.early.items():
            self._deadlines.watch(ticket, answer, timeout_s)
        worker.early.clear()

    def _cancel(self, worker: _Worker, ticket: int) -> None:
        """Ask for the end of a rollout, and replace the worker if it does not even answer."""
        if self._closing or worker.replaced or ticket not in worker.waiting:
            return
        # The caller has gone; the worker's answer is still waited for.
        worker.waiting[ticket] = asyncio.get_running_loop().create_future()
        worker.writer.write(CancelRollout(ticket))
        assert self._tasks is not None
        # A group that is being ended takes no new tasks, and then the worker ends as well.
        with contextlib.suppress(RuntimeError):
            self._tasks.create_task(self._await_cancelled(worker, ticket), name=f"cancel-{ticket}")

    async def _await_cancelled(self, worker: _Worker, ticket: int) -> None:
        answer = worker.waiting.get(ticket)
        if answer is None:
            return
        is_ready = False
        while not is_ready:  # one that starts cannot answer, and nothing of the user's holds it
            is_ready = worker.ready.is_set()
            done, _ = await asyncio.wait([answer], timeout=CANCEL_GRACE_S)
            if done or worker.replaced or self._closing:
                return
        logger.warning(
            "rollout worker %d (pid %d) is stuck in user code and is replaced (where: see the stacks of its threads "
            "below); %d rollouts are tried again",
            worker.index,
            worker.process.pid,
            len(worker.waiting) - 1,
        )
        await self._replace(worker)

    async def _replace(self, worker: _Worker) -> None:
        worker.replaced = True
        self.replaced_workers += 1
        # The new one first: there is always a worker to hand rollouts to.
        await self._start_worker(worker.index)
        self._workers.remove(worker)
        for ticket, answer in worker.waiting.items():
            if not answer.done():
                answer.set_result(RolloutFailed(ticket, "blocked_worker", "user code held the worker", transient=True))
        worker.waiting.clear()
        # Before its connection is closed, which it may take for the end and leave the place where it hangs.
        await _end_with_stacks(worker)
        worker.writer.close()


def worker_command(run_dir: str, job: str) -> list[str]:
    """Return the argument vector of a rollout worker of this run."""
    return [sys.executable, "-m", "pipelinerl.actor.worker_main", "--run-dir", run_dir, "--job", job]


def _take(worker: _Worker, message: FromWorker) -> None:
    match message:
        case RolloutEnded() | RolloutFailed():
            answer = worker.waiting.pop(message.ticket, None)
            # Nobody waits for a rollout that was given up: a late answer has no effect.
            if answer is not None and not answer.done():
                answer.set_result(message)
        case Ready():
            worker.ready.set()
        case Fatal(user_error=True):
            raise DomainError(message.message)
        case Fatal():
            raise WorkerError(f"rollout worker {worker.index}: {message.message}")


async def _end_with_stacks(worker: _Worker) -> None:
    """End a stuck worker: the signal makes it write where its threads are and end, if the user's code lets it."""
    with contextlib.suppress(ProcessLookupError):
        worker.process.send_signal(STACKS_SIGNAL)
    try:
        async with asyncio.timeout(_STACKS_S):
            await worker.process.wait()
    except TimeoutError:
        pass
    finally:
        # Also if the actor ends meanwhile: nobody else knows this worker any more.
        _kill(worker)


def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.process.kill()


def _not_ready(worker: _Worker) -> WorkerError:
    return WorkerError(f"rollout worker {worker.index} was not ready after {START_TIMEOUT_S:g} s")


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
