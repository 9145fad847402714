"""R3: one table says what a failed request means; the same over real HTTP, with T6, O4 and O5."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fakes.completions import as_json, packed

from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm import TrainableLLM, client
from pipelinerl.llm.client import (
    Fault,
    Verdict,
    classify,
    complete,
    connect_fault,
    open_session,
    request_body,
    retry_delay_s,
)
from pipelinerl.records.completion import MEDIA_TYPE, Completion


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
    monkeypatch.setattr(client, "retry_delay_s", lambda *args: 0.0)


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


async def test_o4_a_proxy_in_the_environment_is_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with server(packed()) as (url, _):
        assert (await ask(make_llm(url, max_retries=0))).finish_reason == "stop"
