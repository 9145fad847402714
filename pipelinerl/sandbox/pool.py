"""Pools of sandboxed processes with deadlines that hold: `GraderPool` for answers, `GamePool` for text games.

A process talks over one inherited socket, has none of the run's secrets, and leads a process group of its own. A
request waits for a process, then for the answer until its deadline; a process that exceeds it is killed and replaced.
The event loop itself never runs foreign code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Self

import msgspec

from pipelinerl.sandbox.child import LENGTH_BYTES, frame
from pipelinerl.sandbox.protocol import (
    OVER_LIMIT,
    OVER_LIMIT_GRADE,
    ActInGame,
    CloseGame,
    Done,
    Failed,
    GameOpened,
    GameRequest,
    GameStep,
    Grade,
    GradeAnswer,
    GradeRequest,
    Load,
    OpenGame,
    Reply,
    Request,
    SandboxKind,
    TimedRequest,
    clean_text,
)

LOAD_TIMEOUT_S = 120.0
#: Gradings after which a process is replaced, so that leaks of a library are bounded.
MAX_USES = 5000
_KILL_GRACE_S = 0.5
_OPENING_ATTEMPTS = 3
_MAX_REPLY_BYTES = 256 << 20
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL", "REDIS_URL", "DEATH_FD")
# A grader's deadline is in processor time; with waiting it may take this many times as long.
_PATIENCE = 4.0
# Failures that leave the process as it was.
_HARMLESS = ("grader_raised", "grader_bad_result")
_decode = msgspec.msgpack.Decoder(Reply).decode


@dataclass(eq=False)
class SandboxChild:
    """A running process, its end of the socket, and what it holds."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    loaded: set[str] = field(default_factory=set)
    num_graded: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def end(self) -> None:
        """Kill the process and all that it started, and wait until it is gone."""
        self.writer.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


async def start_child(memory_bytes: int) -> SandboxChild:
    """Start a sandboxed process with `memory_bytes` of address space."""
    ours, theirs = socket.socketpair()
    # Foreign code is found where this process finds its modules.
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipelinerl.sandbox.child"),
            *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
            *("--memory-bytes", str(memory_bytes)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**without_secrets(os.environ), **environ},
            start_new_session=True,
        )
    ours.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return SandboxChild(process, reader, writer)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without keys and tokens: sandboxed processes handle untrusted text."""
    return {key: value for key, value in environ.items() if not any(word in key.upper() for word in _SECRET_WORDS)}


class SandboxPool:
    """What both pools share: starting, asking and ending processes. Use as an async context manager."""

    def __init__(self, kind: SandboxKind, size: int, timeout_s: float, memory_bytes: int) -> None:
        self._kind, self._size, self._timeout_s, self._memory_bytes = kind, size, timeout_s, memory_bytes
        self._children: list[SandboxChild] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in list(self._children):
            await self._end(child)

    @property
    def num_processes(self) -> int:
        return len(self._children)

    async def _start(self) -> SandboxChild:
        child = await start_child(self._memory_bytes)
        self._children.append(child)
        return child

    async def _ask(self, child: SandboxChild, request: Request, path: str, timeout_s: float, what: str) -> Reply:
        """Return the reply to `request`. `path`: grader or game to import first, if the child does not have it yet."""
        if path and path not in child.loaded:
            reply = await self._exchange(child, Load(self._kind, path), LOAD_TIMEOUT_S, f"importing {path}")
            if not isinstance(reply, Done):
                return reply
            child.loaded.add(path)
        return await self._exchange(child, request, timeout_s, what)

    async def _exchange(self, child: SandboxChild, request: Request, timeout_s: float, what: str) -> Reply:
        """Send one request and return its reply. A child that does not give one in time is ended."""
        timed = TimedRequest(request, timeout_s)
        if isinstance(request, GradeRequest):
            timed = TimedRequest(request, _PATIENCE * timeout_s, cpu_s=timeout_s)
        try:
            payload = msgspec.msgpack.encode(timed)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Failed(f"{self._kind}_bad_request", f"{what} cannot be sent to its process: {error}")
        failure: Reply
        try:
            async with asyncio.timeout(timed.timeout_s + _KILL_GRACE_S):
                child.writer.write(frame(payload))
                length = int.from_bytes(await child.reader.readexactly(LENGTH_BYTES), "big")
                if length <= _MAX_REPLY_BYTES:
                    return _decode(await child.reader.readexactly(length))
            failure = Failed(f"{self._kind}_bad_result", f"{what}: an answer of {length} bytes")
        except TimeoutError:
            failure = Failed(f"{self._kind}_timeout", f"{what} took more than {timed.timeout_s:g} s and was killed")
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end(child)
            if child.process.returncode == -signal.SIGXCPU:
                return OVER_LIMIT_GRADE
            failure = Failed(f"{self._kind}_died", f"{what}: its process ended")
        except asyncio.CancelledError:
            # The answer that is under way belongs to nobody: the process cannot be used again.
            await asyncio.shield(self._end(child))
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            failure = Failed(f"{self._kind}_bad_result", f"{what}: not an answer: {error}")
        await self._end(child)
        return failure

    def _failure(self, reply: Reply) -> Failed:
        return reply if isinstance(reply, Failed) else Failed(f"{self._kind}_bad_result", "an answer out of turn")

    async def _end(self, child: SandboxChild) -> None:
        if child in self._children:
            self._children.remove(child)
        await child.end()


class GraderPool(SandboxPool):
    """At most `size` grader processes, started when they are first needed.

    Args:
        size: processes, and so answers that are graded at the same time; further ones queue.
        timeout_s: processor time of one grading, where the request has none.
        memory_bytes: address space of a process.

    Attributes:
        waiting: requests that are graded or queued.
    """

    def __init__(self, size: int, timeout_s: float, memory_bytes: int) -> None:
        super().__init__("grader", size, timeout_s, memory_bytes)
        self._places = asyncio.Semaphore(size)
        self._idle: list[SandboxChild] = []
        self.waiting = 0

    async def grade(self, request: GradeRequest) -> GradeAnswer:
        """Grade one answer. Always returns; the deadline starts when a process has the request."""
        self.waiting += 1
        try:
            async with self._places:
                return await self._grade_now(request)
        finally:
            self.waiting -= 1

    async def _grade_now(self, request: GradeRequest) -> GradeAnswer:
        child = await self._take(request.grader)
        is_usable = False
        try:
            clean = msgspec.structs.replace(request, text=clean_text(request.text))
            timeout_s = request.timeout_s or self._timeout_s
            reply = await self._ask(child, clean, request.grader, timeout_s, request.grader)
            answer = reply if isinstance(reply, Grade) else self._failure(reply)
            # An interrupted grader may have left a library in any state.
            if isinstance(answer, Grade):
                is_usable = OVER_LIMIT not in answer.details
            else:
                is_usable = answer.transient or answer.reason in _HARMLESS
        finally:
            child.num_graded += 1
            if is_usable and child.num_graded < MAX_USES:
                self._idle.append(child)
            else:
                await self._end(child)
        return answer

    async def _take(self, grader: str) -> SandboxChild:
        """Return an idle process, if possible one that has the grader, or a new one."""
        for child in reversed(self._idle):
            if grader in child.loaded:
                self._idle.remove(child)
                return child
        return self._idle.pop() if self._idle else await self._start()


class GamePool(SandboxPool):
    """At most `size` game processes, started when they are first needed; each holds many games.

    A process that is killed takes its other games with it; their rollouts are retried.

    Args:
        size: processes, and so moves that are made at the same time; further ones queue.
        timeout_s: deadline of one move, and of the beginning of a game.
        memory_bytes: address space of a process.
        max_games: games at the same time; one more is refused with `environment_busy`.
        idle_timeout_s: a game without a move for this long is closed when another one begins.
    """

    def __init__(self, size: int, timeout_s: float, memory_bytes: int, max_games: int, idle_timeout_s: float) -> None:
        super().__init__("environment", size, timeout_s, memory_bytes)
        self._max_games, self._idle_timeout_s = max_games, idle_timeout_s
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._games: dict[int, SandboxChild] = {}
        self._last_used: dict[int, float] = {}

    @property
    def num_games(self) -> int:
        return len(self._last_used)

    async def answer(self, request: GameRequest) -> Reply:
        """Do what a client asks for. Always returns."""
        if isinstance(request, OpenGame):
            return await self.open(request)
        if isinstance(request, ActInGame):
            return await self.act(request.number, request.text)
        await self.close(request.number)
        return Done()

    async def open(self, request: OpenGame) -> GameOpened | Failed:
        """Begin a game. Always returns."""
        oldest = monotonic() - self._idle_timeout_s
        for number in [number for number in self._games if self._last_used.get(number, oldest) < oldest]:
            await self.close(number)
        # Games whose process is not known yet count too, so that many beginnings at once stay below the limit.
        if self.num_games >= self._max_games:
            return Failed("environment_busy", f"{self.num_games} games are in progress", True)
        number = next(self._numbers)
        reply: Reply = _lost(number)
        try:
            for _ in range(_OPENING_ATTEMPTS):
                self._last_used[number] = monotonic()
                child = self._games[number] = await self._least_busy()
                reply = await self._move(child, msgspec.structs.replace(request, number=number), request.game)
                if isinstance(reply, GameOpened):
                    self._last_used[number] = monotonic()
                    return reply
                if not isinstance(reply, Failed) or reply.reason != "environment_lost":
                    break  # else another game ended the process before it was this one's turn
        except BaseException:
            self._forget(number)
            raise
        self._forget(number)
        return self._failure(reply)

    async def act(self, number: int, text: str) -> GameStep | Failed:
        """Make a move. Always returns; the deadline starts when it is this game's turn."""
        child = self._games.get(number)
        if child is None:
            return _lost(number)
        self._last_used[number] = monotonic()
        reply = await self._move(child, ActInGame(clean_text(text), number))
        if isinstance(reply, GameStep):
            return reply
        self._forget(number)
        return self._failure(reply)

    async def close(self, number: int) -> None:
        """End a game; a number without a game is no error."""
        child = self._games.get(number)
        if child is not None:
            self._forget(number)
            await self._move(child, CloseGame(number))

    async def _move(self, child: SandboxChild, request: GameRequest, path: str = "") -> Reply:
        async with child.turn:
            if child not in self._children:
                return _lost(request.number)
            return await self._ask(child, request, path, self._timeout_s, f"game {request.number}")

    async def _least_busy(self) -> SandboxChild:
        async with self._starting:
            if len(self._children) < self._size:
                return await self._start()
        holders = list(self._games.values())
        return min(self._children, key=holders.count)

    async def _end(self, child: SandboxChild) -> None:
        for number in [number for number, holder in self._games.items() if holder is child]:
            self._forget(number)
        await super()._end(child)

    def _forget(self, number: int) -> None:
        self._games.pop(number, None)
        self._last_used.pop(number, None)


def _lost(number: int) -> Failed:
    message = f"no game {number}: its process ended, or it was idle"
    return Failed("environment_lost", message, transient=True)
