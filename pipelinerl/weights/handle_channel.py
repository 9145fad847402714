"""A loopback connection on which the trainer offers buffer handles to the workers of one server, one at a time.

One JSON object a line. A worker shows the secret that it got over the server's authenticated control route; whoever
cannot is turned away. Each offer ends with every worker's answer, so the trainer knows when a buffer is free again.
Every operation has a time-out; when either end closes, the other end's operation fails at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from pipelinerl.weights.handles import Handle
from pipelinerl.weights.meeting_port import listen

_MAX_LINE_BYTES = 65536
LOOPBACK = "127.0.0.1"


class _Lines:
    """JSON lines over one socket."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._socket = connection
        self._file = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next object. RuntimeError: the other end is gone, too slow, or sent something else."""
        try:
            line = self._file.readline(_MAX_LINE_BYTES)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"handle channel: {type(error).__name__}: {error}") from error
        if not line.endswith(b"\n"):
            raise RuntimeError("handle channel: the other end closed it")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise RuntimeError(f"handle channel: got {line[:80]!r}, expected an object")
        return message

    def close(self) -> None:
        # Closing alone would leave a thread that reads from it waiting.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class HandleSender:
    """The trainer's end. `port` and `secret` travel to the workers over the server's control route."""

    def __init__(self, port: int | None, timeout_s: float) -> None:
        self._listener = listen(LOOPBACK, port)
        self.port = int(self._listener.getsockname()[1])
        self.secret = secrets.token_urlsafe(24)
        self._timeout_s = timeout_s
        self._workers: list[_Lines] = []

    def accept(self, num_workers: int) -> None:
        """Wait until so many workers have shown the secret. RuntimeError: they did not come in time."""
        deadline = time.monotonic() + self._timeout_s
        while len(self._workers) < num_workers:
            try:
                self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = self._listener.accept()
            except OSError as error:
                have = len(self._workers)
                raise RuntimeError(f"handle channel: {have} of {num_workers} workers came: {error}") from error
            lines = _Lines(connection, self._timeout_s)
            if _shows(lines, self.secret):
                lines.send({"welcome": True})
                self._workers.append(lines)
            else:
                lines.close()

    def offer(self, handle: Handle) -> None:
        """Let every worker copy the buffer. RuntimeError quotes a worker that could not."""
        for worker in self._workers:
            worker.send(handle)
        for worker in self._workers:
            answer = worker.receive()
            if "error" in answer:
                raise RuntimeError(f"handle channel: a worker could not read the buffer: {answer['error']}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for worker in self._workers:
            worker.close()


class HandleReceiver:
    """A worker's end."""

    def __init__(self, port: int, secret: str, timeout_s: float) -> None:
        try:
            connection = socket.create_connection((LOOPBACK, port), timeout_s)
        except OSError as error:
            raise RuntimeError(f"handle channel: the trainer does not listen at port {port}: {error}") from error
        self._lines = _Lines(connection, timeout_s)
        self._lines.send({"secret": secret})
        self._lines.receive()

    def take(self) -> Handle:
        """The handle of the next buffer; `done` or `fail` has to follow."""
        return self._lines.receive()

    def done(self) -> None:
        self._lines.send({"done": True})

    def fail(self, error: str) -> None:
        self._lines.send({"error": error})

    def close(self) -> None:
        self._lines.close()


def _shows(lines: _Lines, secret: str) -> bool:
    try:
        shown = lines.receive().get("secret")
    except (RuntimeError, ValueError):
        return False
    return isinstance(shown, str) and hmac.compare_digest(shown.encode(), secret.encode())
