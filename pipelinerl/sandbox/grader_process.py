"""One grader process: takes a request from its socket, grades, answers. Started by `GraderPool`, never by hand.

Waits for the next request. Ends when the socket or its parent is gone.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any

import msgspec

from pipelinerl.errors import DomainError, RetryableRolloutError
from pipelinerl.sandbox.child_main import DeadlineReached, deadline, run_child
from pipelinerl.sandbox.marking import GraderFunction, load_grader
from pipelinerl.sandbox.messages import (
    GradeAnswer,
    GradeFailed,
    GradeRequest,
    Load,
    Loaded,
    as_grade,
    clean_text,
    frame,
    receive_payload,
)

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


class GraderProcess:
    """Serves `connection` until it is closed."""

    def __init__(self, connection: socket.socket, confinement: Confinement) -> None:
        self._connection = connection
        self._confinement = confinement
        self._graders: dict[str, tuple[GraderFunction, bool]] = {}
        self._decode = msgspec.msgpack.Decoder(GradeRequest | Load).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self) -> None:
        """Answer requests one by one."""
        while (payload := receive_payload(self._connection)) is not None:
            message = self._decode(payload)
            answer = self._load(message.grader) if isinstance(message, Load) else self._grade(message)
            self._connection.sendall(frame(self._encode(answer)))

    def _load(self, path: str) -> Loaded | GradeFailed:
        try:
            self._graders[path] = load_grader(path)
        except DomainError as error:
            return GradeFailed("grader_missing", str(error))
        return Loaded(path)

    def _grade(self, request: GradeRequest) -> GradeAnswer:
        try:
            return self._grade_in_time(request)
        except DeadlineReached:
            return GradeFailed("grader_timeout", f"{request.grader} took more than {request.timeout_s:g} s")

    def _grade_in_time(self, request: GradeRequest) -> GradeAnswer:
        function, confined = self._graders[request.grader]
        try:
            with deadline(request.timeout_s or 0.0):
                self._confinement.is_on = confined
                return as_grade(function(request.text, request.problem, **request.params))
        except RetryableRolloutError as error:
            message = clean_text(str(error).removeprefix(f"{error.reason}: "))
            return GradeFailed(error.reason, message[-_MESSAGE_CHARACTERS:], transient=True)
        except MemoryError:
            return GradeFailed("grader_memory", f"{request.grader} needed more memory than it may have")
        except Exception as error:  # noqa: BLE001 - a grader may raise anything; it fails this rollout only
            lines = traceback.format_exception(error, limit=-_TRACE_LINES)
            return GradeFailed("grader_raised", clean_text("".join(lines))[-_MESSAGE_CHARACTERS:])
        finally:
            self._confinement.is_on = False


def main() -> int:
    confinement = Confinement()
    return run_child(lambda connection: GraderProcess(connection, confinement).serve())


if __name__ == "__main__":
    sys.exit(main())
