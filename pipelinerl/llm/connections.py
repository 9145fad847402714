"""HTTP/1.1 for one purpose: many small POST requests at once to servers on plain HTTP, at little cost each.

Opened by a rollout worker for all of its rollouts and used by `llm.client`. A general client spends most of a rollout's
CPU time on what is not needed here (cookies, redirects, compression, proxies). Waits for the servers.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import cast
from urllib.parse import urlsplit

_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 30


class Response:
    """`retry_after` is the header of that name, if the server sent one."""

    __slots__ = ("body", "retry_after", "status")

    def __init__(self, status: int, body: bytes, retry_after: str | None) -> None:
        self.status = status
        self.body = body
        self.retry_after = retry_after


class BrokenResponseError(ConnectionError):
    """The connection ended in the middle, or what came is no HTTP."""


class _StaleConnectionError(BrokenResponseError):
    """A kept connection had been closed by the server before it saw the request."""


class Connections:
    """Kept connections to any number of servers. Use as a context manager; no limit on how many are open."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._targets: dict[str, tuple[str, int, bytes]] = {}
        # One timer for all requests, at the earliest deadline: to set and cancel one for each costs more than it looks.
        self._alarm: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for connection in list(self._open):
            connection.close()

    async def post(self, url: str, body: bytes, headers: bytes, timeout_s: float) -> Response:
        """Send one request and return the answer, whatever its status.

        Args:
            url: `http://host:port/path`.
            body: sent as it is.
            headers: further header lines, each with its line end.
            timeout_s: for all of it, connecting included.

        Raises:
            TimeoutError: no whole answer in time.
            OSError: the server cannot be reached, or the connection broke (BrokenResponseError).
        """
        target = self._targets.get(url)
        if target is None:
            target = self._targets[url] = _target(url)
        host, port, head = target
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (head, headers, len(body), body)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            connection, is_kept = await self._connect(host, port, deadline)
            if self._alarm is None or deadline < self._alarm.when():
                self._set_alarm(deadline)
            try:
                return await connection.exchange(request, deadline)
            except _StaleConnectionError:
                if not is_kept:
                    raise

    def _set_alarm(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(when, self._expire_late)

    def _expire_late(self) -> None:
        """End the requests whose deadline has passed, and wait for the next one."""
        now = asyncio.get_running_loop().time()
        self._alarm = None
        for connection in [each for each in self._open if each.deadline <= now]:
            connection.expire()
        earliest = min((each.deadline for each in self._open), default=math.inf)
        if earliest < math.inf:
            self._set_alarm(earliest)

    async def _connect(self, host: str, port: int, deadline: float) -> tuple[_Connection, bool]:
        idle = self._idle.setdefault((host, port), deque())
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection, True
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline):
            _, fresh = await loop.create_connection(lambda: _Connection(self._open, idle), host, port)
        return fresh, False


class _Connection(asyncio.Protocol):
    """One connection; one request at a time. Goes back to `idle` by itself after a whole answer."""

    def __init__(self, opened: set[_Connection], idle: deque[_Connection]) -> None:
        self._opened = opened
        self._idle = idle
        self.deadline = math.inf
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted = -1  # bytes of head and body; -1: the head is not complete
        self._head_size = 0
        self._status = 0
        self._retry_after: str | None = None
        self._keep = True
        self._chunked = False

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close at once; a request in flight is broken."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, deadline: float) -> Response:
        """Send a request and wait for its answer. One cancelled or late closes the connection, so the server stops."""
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        answer: asyncio.Future[Response] = loop.create_future()
        self._answer = answer
        self.deadline = deadline
        self._transport.write(request)
        try:
            return await answer
        except asyncio.CancelledError:
            # Behind its answer the connection may be another request's already.
            if answer.cancelled():
                self.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._wanted < 0 and not self._read_head():
            return
        if self._chunked:
            self._read_chunks()
        elif self._size >= self._wanted:
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._finish(whole[self._head_size : self._wanted], clean=self._size == self._wanted)

    def connection_lost(self, error: Exception | None) -> None:
        self._opened.discard(self)
        if self._answer is None:
            return
        if self._wanted == _MAX_BODY_BYTES and not self._chunked:  # no length given: the end of the connection is it
            self._finish(b"".join(self._parts)[self._head_size :], clean=False)
        elif not self._size:
            self._fail(_StaleConnectionError("the server closed the connection"))
        else:
            self._fail(BrokenResponseError(f"the connection ended after {self._size} bytes of an answer"))

    def _read_head(self) -> bool:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES:
                self._refuse("a head without an end")
            self._parts = [data]
            return False
        lines = data[:end].split(b"\r\n")
        first = lines[0].split(b" ", 2)
        if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
            self._refuse("no HTTP/1.1 answer")
            return False
        self._status = int(first[1])
        self._keep = first[0] == b"HTTP/1.1"
        self._retry_after, self._chunked = None, False
        length = _MAX_BODY_BYTES
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    if not value.strip().isdigit():
                        self._refuse("a bad Content-Length")
                        return False
                    length = int(value)
                case b"transfer-encoding":
                    self._chunked = value.strip().lower() == b"chunked"
                case b"connection":
                    self._keep = value.strip().lower() != b"close"
                case b"retry-after":
                    self._retry_after = value.strip().decode("latin-1")
        self._head_size = end + 4
        self._wanted = length if length == _MAX_BODY_BYTES else self._head_size + length
        return True

    def _read_chunks(self) -> None:
        """Put a chunked body together once its last chunk is there."""
        data = b"".join(self._parts)
        self._parts = [data]
        if not data.endswith(b"\r\n\r\n"):
            return
        body: list[bytes] = []
        position = self._head_size
        while True:
            end = data.find(b"\r\n", position)
            try:
                size = int(data[position:end].split(b";", 1)[0], 16) if end >= 0 else -1
            except ValueError:
                self._refuse("a bad chunk")
                return
            if size < 0 or end + 2 + size > len(data):
                return
            if size == 0:
                self._finish(b"".join(body), clean=True)
                return
            body.append(data[end + 2 : end + 2 + size])
            position = end + 4 + size

    def _finish(self, body: bytes, clean: bool) -> None:
        answer, self._answer, self.deadline = self._answer, None, math.inf
        self._parts, self._size, self._wanted = [], 0, -1
        if answer is not None and not answer.done():
            answer.set_result(Response(self._status, body, self._retry_after))
        # What comes unasked belongs to no request: such a connection is not used again.
        if answer is not None and clean and self._keep and self.is_usable:
            self._idle.append(self)
        else:
            self.close()

    def expire(self) -> None:
        """End the request in flight: its deadline has passed."""
        self._fail(TimeoutError("no answer in time"))
        self.close()

    def _refuse(self, reason: str) -> None:
        self._fail(BrokenResponseError(reason))
        self.close()

    def _fail(self, error: Exception) -> None:
        answer, self._answer, self.deadline = self._answer, None, math.inf
        if answer is not None and not answer.done():
            answer.set_exception(error)


def _target(url: str) -> tuple[str, int, bytes]:
    """Return host, port, and the first lines of a request to `url`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"url: got {url!r}, expected http://host:port/path")
    path = parts.path or "/"
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n".encode()
    return parts.hostname, parts.port or 80, head
