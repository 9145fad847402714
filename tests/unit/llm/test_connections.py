"""The worker's own HTTP connections: kept, broken, stale, late, and answers in every framing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from pipelinerl.llm.connections import BrokenResponseError, Connections


def reply(body: bytes, head: str = "") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


class Server:
    """Answers requests with scripted bytes; `None` closes the connection, `b""` says nothing."""

    def __init__(self, answers: Sequence[bytes | list[bytes] | None]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.lost = asyncio.Event()
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                answer = self.answers.pop(0)
                if answer is None:
                    return
                for piece in answer if isinstance(answer, list) else [answer]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if b"Connection: close" in (answer if isinstance(answer, bytes) else b""):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: bytes | list[bytes] | None) -> AsyncIterator[tuple[Server, Connections, str]]:
    script = Server(answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Connections() as connections:
        yield script, connections, f"http://127.0.0.1:{port}/x?y=1"
    server.close()


async def post(connections: Connections, url: str, timeout_s: float = 60) -> tuple[int, bytes]:
    response = await connections.post(url, b"{}", b"Authorization: Bearer t\r\n", timeout_s)
    return response.status, response.body


async def test_one_connection_is_kept() -> None:
    async with serving(reply(b"one"), reply(b"two")) as (server, connections, url):
        assert await post(connections, url) == (200, b"one")
        assert await post(connections, url) == (200, b"two")
    assert server.connections == 1
    request = server.requests[0]
    assert request.startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:") and request.endswith(b"\r\n\r\n{}")
    assert b"Authorization: Bearer t\r\n" in request


async def test_requests_at_once_have_a_connection_each() -> None:
    async with serving(*[reply(b"x")] * 5) as (server, connections, url):
        await asyncio.gather(*(post(connections, url) for _ in range(5)))
    assert server.connections == 5


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([b"HTTP/1.1 200 OK\r\nConte", b"nt-Length: 4\r\n\r", b"\nab", b"cd"], (200, b"abcd")),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\na\n\r\n3;x=y\r\n\r\n", b"\r\r\n0\r\n\r\n"],
         (200, b"a\n\r\n\r")),
        (b"HTTP/1.1 503 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", (503, b"")),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", (200, b"to the end")),
    ],
    ids=["in pieces", "chunked", "closed", "without length"],
)  # fmt: skip
async def test_framings(answer: bytes | list[bytes], expected: tuple[int, bytes]) -> None:
    async with serving(answer, reply(b"next")) as (_, connections, url):
        assert await post(connections, url) == expected
        assert await post(connections, url) == (200, b"next")


async def test_the_wish_to_be_asked_later_is_told() -> None:
    async with serving(reply(b"", "Retry-After: 7\r\n")) as (_, connections, url):
        assert (await connections.post(url, b"", b"", 60)).retry_after == "7"


async def test_a_kept_connection_that_was_closed_is_replaced_without_a_word() -> None:
    async with serving(reply(b"one"), None, reply(b"two")) as (server, connections, url):
        await post(connections, url)
        assert await post(connections, url) == (200, b"two")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "answer",
    [None, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nX: Connection: close\r\n\r\nab", b"SSH-2.0-x\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
     b"x" * 70_000],
)  # fmt: skip
async def test_broken_answers(answer: bytes | None) -> None:
    async with serving(answer) as (_, connections, url):
        with pytest.raises(BrokenResponseError):
            await post(connections, url)


async def test_a_late_or_cancelled_request_closes_its_connection() -> None:
    async with serving(b"", b"") as (server, connections, url):
        with pytest.raises(TimeoutError):
            await post(connections, url, timeout_s=0.1)
        await asyncio.wait_for(server.lost.wait(), 60)
        server.lost.clear()
        server.asked.clear()
        waiting = asyncio.create_task(post(connections, url))
        await asyncio.wait_for(server.asked.wait(), 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(server.lost.wait(), 60)


async def test_a_request_that_takes_over_a_connection_at_once_keeps_its_deadline() -> None:
    async with serving(reply(b"1"), b"") as (script, connections, url):
        first = asyncio.create_task(connections.post(url, b"", b"", 60))
        # In the turn of the loop between the whole answer and the first request's waking up.
        while not any(connections._idle.values()):  # noqa: ASYNC110 - no event comes between the two
            await asyncio.sleep(0)
        assert not first.done()
        async with asyncio.timeout(60):
            with pytest.raises(TimeoutError, match="no answer in time"):
                await connections.post(url, b"", b"", 0.2)
        assert (await first).body == b"1" and script.connections == 1


async def test_a_request_cancelled_behind_its_answer_leaves_the_connection_to_the_next_one() -> None:
    async with serving(reply(b"1"), reply(b"2")) as (script, connections, url):
        first = asyncio.create_task(connections.post(url, b"", b"", 60))
        while not any(connections._idle.values()):  # noqa: ASYNC110 - no event comes between the two
            await asyncio.sleep(0)
        first.cancel()
        assert (await connections.post(url, b"", b"", 60)).body == b"2" and script.connections == 1
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_nobody_listens_and_wrong_addresses() -> None:
    async with serving() as (_, connections, url):
        pass
    with pytest.raises(OSError):
        await post(connections, url)
    with pytest.raises(ValueError, match="expected http://host:port/path"):
        await post(connections, "https://127.0.0.1/x")
