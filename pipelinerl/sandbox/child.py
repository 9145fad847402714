"""One sandboxed process: grades answers or plays games for `sandbox.pool`, one request at a time.

It runs in a single thread, so a deadline can interrupt code that spins in Python; code that blocks in an extension is
killed a moment later, by the kernel at its limit of processor time or by the pool. A grader or game that raises or
exceeds its deadline costs that rollout only. The process ends when its socket or its parent is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pipelinerl.errors import DomainError, RetryableRolloutError
from pipelinerl.sandbox.protocol import (
    OVER_LIMIT_GRADE,
    ActInGame,
    CloseGame,
    Done,
    Failed,
    GameOpened,
    GradeRequest,
    GraderFunction,
    Load,
    OpenGame,
    Reply,
    SandboxKind,
    TextGame,
    TimedRequest,
    as_grade,
    as_step,
    clean_text,
    load_game,
    load_grader,
)

#: A message on the socket: its length in so many bytes, big-endian, then msgpack.
LENGTH_BYTES = 4
_PR_SET_PDEATHSIG = 1
_REPEAT_S = 0.05  # code that swallows the interruption gets it again
_KILL_GRACE_S = 1.0
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.spawn",
    "pty.",
    "socket.",
    "ctypes.",
)
_FORBIDDEN_FILES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "shutil.")
_TRACE_LINES = 3
_MESSAGE_CHARACTERS = 2000


class DeadlineReached(BaseException):
    """Raised inside foreign code. Not an `Exception`, so that `except Exception` does not stop it."""


class WorkedTooLong(DeadlineReached):
    """The deadline in processor time."""


class Confinement:
    """An audit hook that refuses programs, connections and writes while `is_on`. A hook cannot be removed again."""

    def __init__(self) -> None:
        self.is_on = False
        sys.addaudithook(self._check)

    def _check(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITE_FLAGS
        if writes or event.startswith(_FORBIDDEN) or event.startswith(_FORBIDDEN_FILES):
            raise PermissionError(f"{event} is refused while an answer is graded")


class SandboxedProcess:
    """Serves a connection, one request after the other, until it is closed."""

    def __init__(self) -> None:
        self._confinement = Confinement()
        self._graders: dict[str, tuple[GraderFunction, bool]] = {}
        self._games: dict[int, TextGame] = {}

    def serve(self, connection: socket.socket) -> None:
        decode, encode = msgspec.msgpack.Decoder(TimedRequest).decode, msgspec.msgpack.encode
        with connection.makefile("rwb") as stream:
            while len(header := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
                timed = decode(stream.read(int.from_bytes(header, "big")))
                stream.write(frame(encode(self._answer(timed))))
                stream.flush()

    def _answer(self, timed: TimedRequest) -> Reply:
        request = timed.request
        if isinstance(request, Load):
            return self._load(request)
        if isinstance(request, GradeRequest):
            return self._guarded(timed, "grader", request.grader, lambda: self._grade(request))
        if isinstance(request, CloseGame):
            game = self._games.pop(request.number, None)
            if game is not None:
                self._guarded(timed, "environment", "closing a game", lambda: _close(game))
            return Done()
        answer = self._guarded(timed, "environment", f"game {request.number}", lambda: self._play(request))
        if isinstance(answer, Failed):
            self._games.pop(request.number, None)
        return answer

    def _load(self, request: Load) -> Reply:
        try:
            if request.kind == "grader":
                self._graders[request.path] = load_grader(request.path)
            else:
                load_game(request.path)
        except (DomainError, ImportError) as error:
            return Failed(f"{request.kind}_missing", str(error))
        return Done()

    def _guarded(self, timed: TimedRequest, kind: SandboxKind, what: str, run: Callable[[], Reply]) -> Reply:
        try:  # the interruption repeats, so it may also arrive while an exception is handled
            return self._run(timed, kind, what, run)
        except WorkedTooLong:
            return OVER_LIMIT_GRADE
        except DeadlineReached:
            return Failed(f"{kind}_timeout", f"{what} took more than {timed.timeout_s:g} s")

    def _run(self, timed: TimedRequest, kind: SandboxKind, what: str, run: Callable[[], Reply]) -> Reply:
        try:
            with _deadline(timed):
                return run()
        except RetryableRolloutError as error:
            message = clean_text(str(error).removeprefix(f"{error.reason}: "))
            return Failed(error.reason, message[-_MESSAGE_CHARACTERS:], transient=True)
        except MemoryError:
            if kind == "grader":
                return OVER_LIMIT_GRADE
            return Failed(f"{kind}_memory", f"{what} needed more memory than it may have")
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything; it fails this rollout only
            lines = traceback.format_exception(error, limit=-_TRACE_LINES)
            return Failed(f"{kind}_raised", clean_text("".join(lines))[-_MESSAGE_CHARACTERS:])
        finally:
            self._confinement.is_on = False

    def _grade(self, request: GradeRequest) -> Reply:
        function, self._confinement.is_on = self._graders[request.grader]
        return as_grade(function(request.text, request.problem, **request.params))

    def _play(self, request: OpenGame | ActInGame) -> Reply:
        if isinstance(request, OpenGame):
            opened: TextGame = load_game(request.game)(request.problem)
            self._games[request.number] = opened
            return GameOpened(request.number, clean_text(str(opened.start())))
        game = self._games.get(request.number)
        if game is None:
            return Failed("environment_lost", f"no game {request.number}", transient=True)
        return as_step(game.act(request.text))


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def _close(game: TextGame) -> Done:
    game.close()
    return Done()


@contextlib.contextmanager
def _deadline(timed: TimedRequest) -> Iterator[None]:
    """Raise `DeadlineReached` in the code inside after `timeout_s`, and `WorkedTooLong` after `cpu_s` of work.

    A process that works on nevertheless is killed with SIGXCPU.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    signal.setitimer(signal.ITIMER_REAL, timed.timeout_s, _REPEAT_S)
    if timed.cpu_s is not None:
        signal.setitimer(signal.ITIMER_PROF, timed.cpu_s, _REPEAT_S)
        last_s = math.ceil(time.process_time() + timed.cpu_s + _KILL_GRACE_S)
        resource.setrlimit(resource.RLIMIT_CPU, (last_s if hard == resource.RLIM_INFINITY else min(last_s, hard), hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _interrupt(signum: int, stack: object) -> None:
    raise WorkedTooLong if signum == signal.SIGPROF else DeadlineReached


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def main() -> int:
    """Limit this process, tie its life to its parent's, and serve the inherited socket until it is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the pool")
    parser.add_argument("--parent", type=int, required=True, help="process id of the pool")
    parser.add_argument("--memory-bytes", type=int, required=True)
    arguments = parser.parse_args()
    if sys.platform == "linux":
        _end_with_parent(arguments.parent)
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _interrupt)
    with socket.socket(fileno=arguments.fd) as connection:
        SandboxedProcess().serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
