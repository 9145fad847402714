"""R3: one table says what a failed request means; the same over real HTTP, with T6, O4 and O5."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fakes.completions import as_json, packed

from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm import TrainableLLM, trainable
from pipelinerl.llm.client import Fault, Verdict, classify, connect_fault, open_session, retry_delay_s
from pipelinerl.llm.completions import Completion
from pipelinerl.llm.trainable import complete, request_body
from pipelinerl.records.completion import MEDIA_TYPE


@pytest.mark.parametrize(
    ("verdict", "problems"),
    [
        (Verdict.FAIL_ROLLOUT, [307, 400, 413, 418, 422]),
        (Verdict.END_RUN, [401, 403, 404, 405]),
        (Verdict.RETRY, [408, 409, 429, 500, 502, 503, 504, 507, *Fault]),
    ],
)
def test_r3_every_problem_has_one_verdict(verdict: Verdict, problems: list[int | Fault]) -> None:
    assert {problem: classify(problem) for problem in problems} == dict.fromkeys(problems, verdict)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), Fault.REFUSED),
        (OSError(errno.EHOSTUNREACH, "No route to host"), Fault.REFUSED),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 101] b"), Fault.REFUSED),
        (ConnectionResetError(), Fault.REFUSED),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Fault.CANNOT_CONNECT),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), Fault.CANNOT_CONNECT),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), Fault.CANNOT_CONNECT),
        (OSError(errno.EADDRNOTAVAIL, "no port is left"), Fault.CANNOT_CONNECT),
    ],
)
def test_only_what_the_other_side_says_is_a_refusal(error: OSError, fault: Fault) -> None:
    found, text = connect_fault(error)
    assert found is fault
    assert (str(error) or "ConnectionResetError") in text


def test_delays_double_up_to_a_cap_and_honor_the_server() -> None:
    assert [retry_delay_s(attempt, jitter=0.0) for attempt in (0, 1, 2)] == [0.125, 0.25, 0.5]
    assert retry_delay_s(0, jitter=0.5) == 0.1875
    assert retry_delay_s(20, jitter=0.0) == 5.0
    assert retry_delay_s(0, jitter=0.0, retry_after_s=3) == 3
    assert retry_delay_s(0, jitter=0.0, retry_after_s=900) == 10


def make_llm(url: str = "http://unused", **settings: Any) -> TrainableLLM:
    parameters = {"max_tokens": 10, "temperature": 0.7}
    return TrainableLLM(url, "actor", parameters=parameters, token="secret-token", **settings)


def test_t6_the_context_is_checked_before_anything_is_sent() -> None:
    llm = make_llm(max_model_len=8)
    assert request_body(llm, [1] * 5)["sampling_params"]["max_tokens"] == 3
    for prompt, reason in (([1] * 8, "context_overflow"), ([], "empty_prompt")):
        with pytest.raises(RolloutError) as failed:
            request_body(llm, prompt)
        assert failed.value.reason == reason
    assert llm.counters.requests == 1


def test_o3_seeds_of_requests_follow_from_the_rollouts_seed() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        llm = make_llm().for_rollout(seed)
        return [request_body(llm, [1])["sampling_params"].get("seed") for _ in range(3)]

    assert seeds(7) == seeds(7)
    assert seeds(7)[0] == 7 and len({*seeds(7), *seeds(8)}) == 6
    assert seeds(None) == [None, None, None]


def test_o5_the_token_is_never_shown() -> None:
    assert "secret-token" not in repr(make_llm())


@asynccontextmanager
async def server(*replies: Any) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Gives one reply per request: a body, a status, or `hang` / `close`."""
    bodies: list[dict[str, Any]] = []
    waiting = list(replies)

    async def generate(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret-token"
        bodies.append(await request.json())
        reply = waiting.pop(0)
        if reply == "hang":
            await asyncio.sleep(30)
        if reply == "close":
            assert request.transport is not None
            request.transport.close()
        if isinstance(reply, int):
            headers = {"Retry-After": "0", "Location": "/inference/v1/generate"}
            return web.json_response({"error": {"message": "no"}}, status=reply, headers=headers)
        is_json = isinstance(reply, bytes) and reply.startswith(b"{")
        return web.Response(body=reply, content_type="application/json" if is_json else MEDIA_TYPE)

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainable, "retry_delay_s", lambda *args: 0.0)


async def ask(llm: TrainableLLM) -> Completion:
    async with open_session() as session:
        return await complete(llm, [1, 2], session)


async def failure(llm: TrainableLLM) -> RolloutError:
    with pytest.raises(RolloutError) as failed:
        await ask(llm)
    return failed.value


@pytest.mark.parametrize("fault", [429, 500, 503, "close", packed(finish_reason="abort"), as_json(token_ids=[])])
async def test_r3_transient_faults_are_retried_with_the_same_request(fault: Any) -> None:
    async with server(fault, packed()) as (url, bodies):
        llm = make_llm(url).for_rollout(7)
        assert (await ask(llm)).token_ids == [5, 6, 7]
    assert bodies[0] == bodies[1]
    assert (llm.counters.requests, llm.counters.retries) == (1, 1)
    assert llm.counters.versions == {3, 4}


async def test_one_client_reads_packed_and_json_answers() -> None:
    """X4: two forms of one answer, one rule."""
    async with server(packed(), as_json()) as (url, _):
        assert (await ask(make_llm(url))) == (await ask(make_llm(url)))


async def test_r3_what_is_not_retried_for_ever_fails_the_rollout_or_ends_the_run() -> None:
    async with server(500, 500) as (url, bodies):
        failed = await failure(make_llm(url, max_retries=1))
        assert isinstance(failed, RetryableRolloutError) and failed.reason == "http_500" and len(bodies) == 2
    for status in (400, 307):  # a redirect is not followed
        async with server(status) as (url, bodies):
            failed = await failure(make_llm(url))
            assert not isinstance(failed, RetryableRolloutError) and failed.reason == f"http_{status}"
            assert len(bodies) == 1
    for status in (401, 404):
        async with server(status) as (url, _):
            llm = make_llm(url)
            with pytest.raises(EndRunError):
                await ask(llm)
        assert f"http_{status}" in str(llm.counters.fatal) and "secret-token" not in str(llm.counters.fatal)


async def test_r3_time_out_and_connections_that_cannot_be_made() -> None:
    async with server("hang") as (url, _):
        assert (await failure(make_llm(url, request_timeout_s=0.1, max_retries=0))).reason == "timeout"
    assert (await failure(make_llm(url, max_retries=0))).reason == "refused"
    assert (await failure(make_llm("http://no-such-host.invalid:80", max_retries=0))).reason == "cannot_connect"


async def test_a_process_without_descriptors_says_so() -> None:
    """X6: the limit of descriptors is named."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with server(packed()) as (url, bodies):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            failed = await failure(make_llm(url, max_retries=0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert failed.reason == "cannot_connect" and "ulimit -n" in str(failed)
        assert bodies == []
        assert (await ask(make_llm(url, max_retries=0))).token_ids == [5, 6, 7]


async def test_o4_a_proxy_in_the_environment_is_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with server(packed()) as (url, _):
        assert (await ask(make_llm(url, max_retries=0))).finish_reason == "stop"


async def test_connections_are_kept_and_a_cancelled_request_closes_its_own() -> None:
    """The server sees the closed connection and stops sampling."""
    peers: list[Any] = []
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer)
        body = as_json()
        try:
            for _ in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                sent = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                assert json.loads(sent)["token_ids"] == [1, 2]
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()  # the rest of the request, until the connection ends
        finally:
            closed.set()
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    llm = make_llm(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    async with open_session() as session:
        assert isinstance(session.connector, aiohttp.TCPConnector)
        assert (session.connector.limit, session.connector.limit_per_host) == (0, 0)
        for _ in range(2):
            assert (await complete(llm, [1, 2], session)).token_ids == [5, 6, 7]
        waiting = asyncio.create_task(complete(llm, [1, 2], session))
        await asyncio.wait_for(asked.wait(), 60)
        assert len(peers) == 1 and not closed.is_set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(closed.wait(), 60)
    listening.close()
