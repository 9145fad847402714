"""The pool of rollout workers (processes that run the user's rollouts), and the messages between actor and workers.

A worker that dies ends the run with its exit code; its last output is in the actor's `stderr.log`, which the workers
share. A worker whose event loop is held by user code for `BLOCK_LIMIT_S` writes the stacks of its threads to its stderr
and ends; it is replaced, and its rollouts are tried again.

| who waits    | for                                          | at most                    |
|--------------|----------------------------------------------|----------------------------|
| `run`        | the worker's answer                          | the rollout's time-out     |
| `wait_ready` | user code and tokenizer to be loaded         | `START_TIMEOUT_S`          |
| `_follow`    | a worker's next message, or its end          |                            |
| `close`      | workers to end after their socket closed     | `_STOP_GRACE_S`, then kill |
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from pipelinerl.errors import DomainError, RolloutError, WorkerError
from pipelinerl.records import EvaluationSample, RolloutSummary, Sample

logger = logging.getLogger(__name__)

BLOCK_LIMIT_S = 60.0
START_TIMEOUT_S = 600.0
_STOP_GRACE_S = 5.0
#: Exit codes of a worker. faulthandler exits with 1 when user code held the event loop for too long.
BLOCKED_EXIT_CODE = 1
CRASHED_EXIT_CODE = 3
#: Failure of a rollout whose server went away. It says nothing about the rollout, which runs again elsewhere.
SERVER_LOST = "server_lost"
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 1 << 31
# New objects before the collector looks at them (Python: 700), and passes before it looks at older ones (10, 10).
_GC_THRESHOLDS = (20_000, 20, 20)


class Servers(msgspec.Struct, tag="servers"):
    """To a worker, before the first rollout and whenever a server joined: all servers, in the scheduler's order.

    `max_model_len` is the longest sequence in tokens (None: unknown).
    """

    urls: list[str]
    max_model_len: int | None


class StartRollout(msgspec.Struct, tag="start"):
    """One rollout to run; to a worker. `record` asks for the tokens of an evaluation.

    `evaluation_set` says how an evaluation samples (`RunConfig.evaluation_parameters`). `server` and `ticket`, which
    names a try in all answers, are set for each try.
    """

    rollout_id: str
    group_id: str
    problem: dict[str, Any]
    seed: int
    evaluation: bool = False
    evaluation_set: int = 0
    record: bool = False
    server: int = 0
    ticket: int = 0


class CancelRollout(msgspec.Struct, tag="cancel"):
    """To a worker, which answers with `RolloutFailed`."""

    ticket: int


class Ready(msgspec.Struct, tag="ready"):
    """From a worker, once: user code is imported and the tokenizer is loaded."""

    pid: int


class RolloutEnded(msgspec.Struct, tag="ended"):
    """From a worker: a rollout ended. `samples` is empty for evaluations, and `recorded` are their tokens on request.

    `min_version` and `max_version` are those that sampled its tokens.
    """

    ticket: int
    samples: list[Sample]
    summary: RolloutSummary
    dataset_name: str | None
    min_version: int | None
    max_version: int | None
    requests: int
    retries: int
    recorded: list[EvaluationSample] = []


class RolloutFailed(msgspec.Struct, tag="failed"):
    """From a worker: a rollout failed. `transient`: another try may succeed."""

    ticket: int
    reason: str
    message: str
    transient: bool = False
    requests: int = 0
    retries: int = 0


class Fatal(msgspec.Struct, tag="fatal"):
    """From a worker: the run must end. `user_error` asks for exit code 2 and no traceback."""

    user_error: bool
    message: str


Answer = RolloutEnded | RolloutFailed
ToWorker = Servers | StartRollout | CancelRollout
FromWorker = Ready | RolloutEnded | RolloutFailed | Fatal
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_ended_decoder = msgspec.msgpack.Decoder(RolloutEnded)


class Connection(Generic[T]):
    """One end of the socket pair. Messages are small in number (bounded by the slots), so writes are not awaited.

    Args:
        received: union of the messages that the other end sends.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(received)
        self._unsent = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message. Those of one pass of the event loop are written together: rollouts come in bursts."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        payload = _encoder.encode(message)
        self._unsent += len(payload).to_bytes(_LENGTH_BYTES, "big")
        self._unsent += payload

    def _write(self) -> None:
        if self._unsent:
            self._writer.write(bytes(self._unsent))
            self._unsent.clear()

    async def flush(self) -> None:
        """Wait until most of what was queued has been sent."""
        self._write()
        await self._writer.drain()

    async def receive(self) -> T | None:
        """Wait for the next message; None once the other end is gone, even in the middle of a message.

        Raises:
            ValueError: the length is impossible.
            msgspec.MsgspecError: the content is not a known message.
        """
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"message length: got {length} bytes, expected at most {_MAX_MESSAGE_BYTES}")
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        message: T = self._decoder.decode(payload)
        return message

    def close(self) -> None:
        """Send what is queued, and close."""
        self._write()
        self._writer.close()


def rest_collector() -> None:
    """Make Python's garbage collector pass seldom, and only over new objects.

    Rollouts make many small objects that are in no cycle. With Python's own thresholds its passes take a fifth of the
    CPU time of a short rollout.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def check_sendable(answer: RolloutEnded) -> None:
    """Check that the actor can read `answer`, whose values user code made.

    Raises:
        RolloutError: `bad_value`: a value has the wrong type, or no encoding.
    """
    try:
        _ended_decoder.decode(_encoder.encode(answer))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise RolloutError("bad_value", f"the rollout's result has a value that cannot be recorded: {error}") from error


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
            "user code held rollout worker %d for too long (see the traceback above); the worker is replaced and "
            "%d rollouts are tried again",
            worker.index,
            len(worker.pending),
        )
        self.replaced_workers += 1
        # The new one first: there is always a worker for new rollouts.
        await self._start_worker(worker.index)
        self._workers.remove(worker)
        for ticket, pending in worker.pending.items():
            if not pending.answer.done():
                failure = RolloutFailed(ticket, "blocked_worker", "user code held the worker", transient=True)
                pending.answer.set_result(failure)
        worker.pending.clear()
        worker.connection.close()

    def _cancel(self, worker: _Worker, ticket: int) -> None:
        """Cancel a rollout that nobody waits for any more. It counts as pending until the worker answers."""
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
            # A late answer to a rollout that was given up has no effect.
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
