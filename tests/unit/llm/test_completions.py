"""What the client makes of a server's answers: checks T2, T5, T6 and D9, and R3 over real HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import Fault, open_session
from pipelinerl.llm.completions import Completion, read_completion
from pipelinerl.llm.trainable import complete, request_body
from pipelinerl.records import VersionSpan
from pipelinerl.records.completion import MEDIA_TYPE, PackedSpan, encode_completion


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"token_id": t, "logprob": -0.5, "rank": 1, "top_logprobs": []} for t in (5, 6, 7)]},
        "finish_reason": "stop",
        "stop_reason": None,
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    }
    return {"request_id": "x", "choices": [choice | changes], "usage": {}}


def read(**changes: Any) -> Completion | Fault:
    return read_completion(json.dumps(answer(**changes)).encode())


def test_a_proper_answer() -> None:
    completion = read()
    assert isinstance(completion, Completion)
    assert completion.token_ids == [5, 6, 7]
    assert completion.logprobs == [-0.5, -0.5, -0.5]
    assert completion.version_spans == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]
    assert completion.stop_string is None


def packed(**changes: Any) -> bytes:
    """The proper answer in bytes; `ids` and `logprobs` are lists."""
    ids = changes.get("token_ids", [5, 6, 7])
    logprobs = changes.get("logprobs", [-0.5, -0.5, -0.5])
    spans = changes.get("weight_versions", [("3", 0, 2), ("4", 2, 3)])
    return encode_completion(
        array("i", ids).tobytes(),
        None if logprobs is None else array("f", logprobs).tobytes(),
        changes.get("finish_reason", "stop"),
        changes.get("stop_reason"),
        None if spans is None else [PackedSpan(*span) for span in spans],
    )


def test_a_proper_answer_in_bytes_is_the_same() -> None:
    assert read_completion(packed()) == read()
    with_stop = read_completion(packed(stop_reason="END"))
    assert isinstance(with_stop, Completion) and with_stop.stop_string == "END"
    without = read_completion(packed(logprobs=None), collect_logprobs=False)
    assert isinstance(without, Completion) and without.logprobs == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "missing_logprobs"),
        ({"logprobs": [-0.5, -0.5]}, "length_mismatch"),
        ({"logprobs": [-0.5, math.nan, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, -math.inf, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, -9999.0, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, 0.5, -0.5]}, "bad_logprob"),
        ({"logprobs": [-math.inf, math.inf, -0.5]}, "bad_logprob"),
        ({"weight_versions": None}, "unversioned"),
        ({"weight_versions": [("default", 0, 3)]}, "unversioned"),
        ({"weight_versions": [("3", 0, 2)]}, "bad_version_spans"),
        ({"weight_versions": [("3", 1, 3)]}, "bad_version_spans"),
        ({"finish_reason": "mystery"}, "bad_finish_reason"),
    ],
)
def test_t2_bytes_that_cannot_be_trained_on_are_refused_with_the_same_reasons(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RolloutError) as refused:
        read_completion(packed(**changes))
    assert refused.value.reason == reason


def test_t2_bytes_that_are_cut_off_are_refused() -> None:
    content = packed()
    for end in range(1, len(content)):
        with pytest.raises(RolloutError, match="bad_response"):
            read_completion(content[:end])


def test_d9_aborted_and_empty_answers_in_bytes_are_tried_again() -> None:
    assert read_completion(packed(finish_reason="abort", logprobs=[])) is Fault.ABORTED
    assert read_completion(packed(finish_reason=None)) is Fault.ABORTED
    assert read_completion(packed(token_ids=[], logprobs=[])) is Fault.EMPTY


def entries(*values: float | None) -> dict[str, Any]:
    return {"content": [{"token_id": t, "logprob": v} for t, v in zip((5, 6, 7), values, strict=False)]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "missing_logprobs"),
        ({"logprobs": {"content": None}}, "missing_logprobs"),
        ({"logprobs": entries(-0.5, -0.5)}, "length_mismatch"),
        ({"logprobs": entries(-0.5, None, -0.5)}, "bad_logprob"),
        ({"logprobs": entries(-0.5, -9999.0, -0.5)}, "bad_logprob"),
        ({"logprobs": entries(-0.5, -9998.0, -0.5)}, "bad_logprob"),
        ({"logprobs": entries(-0.5, 0.5, -0.5)}, "bad_logprob"),
        ({"token_ids": [5, 6, 8]}, "length_mismatch"),
        ({"weight_versions": None}, "unversioned"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "unversioned"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "bad_version_spans"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 3}]}, "bad_version_spans"),
        ({"finish_reason": "mystery"}, "bad_finish_reason"),
    ],
)
def test_t2_answers_that_cannot_be_trained_on_are_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RolloutError) as refused:
        read(**changes)
    assert refused.value.reason == reason
    assert not isinstance(refused.value, RetryableRolloutError)


def test_t2_nan_and_garbage_are_refused() -> None:
    for content in (b"{", b"\xff", b'{"choices": []}', json.dumps(answer(logprobs=entries(float("nan")))).encode()):
        with pytest.raises(RolloutError, match="bad_response"):
            read_completion(content)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"finish_reason": "abort"}, Fault.ABORTED),
        ({"finish_reason": None}, Fault.ABORTED),
        ({"token_ids": []}, Fault.EMPTY),
    ],
)
def test_d9_aborted_and_empty_answers_are_tried_again(changes: dict[str, Any], fault: Fault) -> None:
    assert read(**changes) is fault


def make_llm(url: str = "http://unused", **settings: Any) -> TrainableLLM:
    return TrainableLLM(
        url, "actor", parameters={"max_tokens": 10, "temperature": 0.7}, token="secret-token", **settings
    )


def test_t6_the_context_is_checked_before_anything_is_sent() -> None:
    llm = make_llm(max_model_len=8)
    assert request_body(llm, [1] * 5)["sampling_params"]["max_tokens"] == 3
    with pytest.raises(RolloutError, match="context_overflow"):
        request_body(llm, [1] * 8)
    with pytest.raises(RolloutError, match="empty_prompt"):
        request_body(llm, [])
    assert llm.counters.requests == 1


def test_seeds_of_requests_follow_from_the_rollouts_seed() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        llm = make_llm().for_rollout(seed)
        return [request_body(llm, [1])["sampling_params"].get("seed") for _ in range(3)]

    assert seeds(7) == seeds(7)
    assert seeds(7)[0] == 7 and len({*seeds(7), *seeds(8)}) == 6
    assert seeds(None) == [None, None, None]


def test_o5_the_token_is_never_shown() -> None:
    assert "secret-token" not in repr(make_llm())


Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(*replies: Any) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Answers one request with each reply: a body, a status, or `hang` / `close`."""
    bodies: list[dict[str, Any]] = []
    waiting = list(replies)

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        assert request.headers["Authorization"] == "Bearer secret-token"
        assert request.headers["Accept"] == f"{MEDIA_TYPE}, application/json"
        reply = waiting.pop(0)
        if reply == "hang":
            await asyncio.sleep(30)
        if reply == "close":
            assert request.transport is not None
            request.transport.close()
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "no"}}, status=reply, headers={"Retry-After": "0"})
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type=MEDIA_TYPE)
        return web.json_response(reply)

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


async def ask(llm: TrainableLLM) -> Completion:
    async with open_session() as session:
        return await complete(llm, [1, 2], session)


@pytest.mark.parametrize("fault", [429, 500, 503, "close", answer(finish_reason="abort"), answer(token_ids=[])])
async def test_passing_faults_are_tried_again_with_the_same_request(fault: Any) -> None:
    async with server(fault, answer()) as (url, bodies):
        llm = make_llm(url).for_rollout(7)
        assert (await ask(llm)).token_ids == [5, 6, 7]
    assert bodies[0] == bodies[1]
    assert (llm.counters.requests, llm.counters.retries) == (1, 1)
    assert llm.counters.versions == {3, 4}


async def test_one_client_reads_servers_that_answer_in_bytes_and_plain_ones() -> None:
    async with server(packed(), answer(), packed(finish_reason="abort"), packed(token_ids=[9, 6, 7])) as (url, bodies):
        assert (await ask(make_llm(url))) == (await ask(make_llm(url)))
        assert (await ask(make_llm(url))).token_ids == [9, 6, 7]
    assert len(bodies) == 4


async def test_retries_are_capped() -> None:
    async with server(500, 500) as (url, bodies):
        with pytest.raises(RetryableRolloutError, match=r"http_500.*2 attempts"):
            await ask(make_llm(url, max_retries=1))
    assert len(bodies) == 2


async def test_a_refused_request_fails_the_rollout_at_once() -> None:
    async with server(400) as (url, bodies):
        with pytest.raises(RolloutError, match="http_400"):
            await ask(make_llm(url))
    assert len(bodies) == 1


@pytest.mark.parametrize("status", [401, 404])
async def test_a_wrong_token_or_model_ends_the_run(status: int) -> None:
    async with server(status) as (url, _):
        llm = make_llm(url)
        with pytest.raises(EndRunError, match=f"http_{status}"):
            await ask(llm)
    assert llm.counters.fatal is not None and "secret-token" not in llm.counters.fatal


async def test_time_out_and_refused_connection() -> None:
    async with server("hang") as (url, _):
        with pytest.raises(RetryableRolloutError, match="timeout"):
            await ask(make_llm(url, request_timeout_s=0.1, max_retries=0))
    with pytest.raises(RetryableRolloutError, match="refused"):
        await ask(make_llm(url, max_retries=0))


async def test_a_name_that_does_not_resolve_is_no_refusal() -> None:
    with pytest.raises(RetryableRolloutError, match="cannot_connect") as failed:
        await ask(make_llm("http://no-such-host.invalid:80", max_retries=0))
    assert failed.value.reason == "cannot_connect"


async def test_a_process_without_descriptors_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with server(answer()) as (url, bodies):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(RetryableRolloutError, match="Too many open files"):
                await ask(make_llm(url, max_retries=0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert bodies == []
        assert (await ask(make_llm(url, max_retries=0))).token_ids == [5, 6, 7]


async def test_o4_a_proxy_in_the_environment_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with server(answer()) as (url, _):
        assert (await ask(make_llm(url, max_retries=0))).finish_reason == "stop"


async def test_a_redirect_is_not_followed() -> None:
    async with server(307) as (url, bodies):
        with pytest.raises(RolloutError, match="http_307"):
            await ask(make_llm(url))
    assert len(bodies) == 1


async def test_connections_are_kept_and_a_cancelled_request_closes_its_own() -> None:
    """The server sees the closed connection and stops sampling."""
    peers: list[Any] = []
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer)
        body = json.dumps(answer()).encode()
        try:
            for _ in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()  # the rest of the request, then the end of the connection
            await reader.read()
        finally:
            closed.set()
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    llm = make_llm(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    async with open_session() as session:
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


async def test_the_session_has_no_limit_of_its_own() -> None:
    async with open_session() as session:
        assert isinstance(session.connector, aiohttp.TCPConnector)
        assert (session.connector.limit, session.connector.limit_per_host) == (0, 0)
