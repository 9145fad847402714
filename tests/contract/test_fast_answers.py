"""The fast route of a real server says what vLLM's own route says, and refuses what that refuses."""

from __future__ import annotations

import http.client
import json
import select
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.fake_server import FakeServer
from fakes.mid_sequence import ATTEMPTS, num_running
from fakes.random_model import random_ids, random_model
from fakes.updated_server import publish
from fakes.vllm_process import VLLMProcess

from pipelinerl.records.completion import (
    GENERATE_PATH,
    MEDIA_TYPE,
    Completion,
    decode_completion,
    is_packed,
    read_completion,
    unpack_ids,
    unpack_logprobs,
)

Server = VLLMProcess | FakeServer


@pytest.fixture(scope="module")
def published_server(tiny_server: VLLMProcess) -> VLLMProcess:
    publish(tiny_server, 3, random_model())
    return tiny_server


def post(server: Server, body: Any, accept: str = "*/*", token: str | None = None) -> tuple[int, bytes]:
    connection = connect(server, body, accept, token)
    try:
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def connect(
    server: Server, body: Any, accept: str = MEDIA_TYPE, token: str | None = None
) -> http.client.HTTPConnection:
    address = urlsplit(server.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept": accept, "Authorization": f"Bearer {token or server.token}"}
    connection.request("POST", GENERATE_PATH, content, headers)
    return connection


def has_answer(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has begun to answer."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def request(**sampling: Any) -> dict[str, Any]:
    parameters = {"max_tokens": 24, "temperature": 1.0, "logprobs": 0, "seed": 11, **sampling}
    return {"model": "actor", "token_ids": random_ids(12, seed=1), "sampling_params": parameters}


def fast(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The answer in bytes, as a choice of the other form."""
    status, content = post(server, body, MEDIA_TYPE)
    assert status == 200 and is_packed(content), content
    packed = decode_completion(content)
    return {
        "token_ids": unpack_ids(packed.token_ids),
        "logprobs": None if packed.logprobs is None else unpack_logprobs(packed.logprobs),
        "finish_reason": packed.finish_reason,
        "stop_reason": packed.stop_reason,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in packed.weight_versions or []
        ],
    }


def plain(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, content = post(server, body)
    assert status == 200, content
    (choice,) = json.loads(content)["choices"]
    return choice


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"ignore_eos": True, "detokenize": False},
        {"max_tokens": 1},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_tokens": 5},
        {"logprobs": None},
        {"repetition_penalty": 1.3, "logit_bias": {"5": 2.0}},
    ],
)
def test_both_routes_say_the_same(published_server: VLLMProcess, sampling: dict[str, Any]) -> None:
    expected, got = plain(published_server, request(**sampling)), fast(published_server, request(**sampling))
    entries = (expected["logprobs"] or {}).get("content")
    assert got["token_ids"] == expected["token_ids"]
    assert got["logprobs"] == (
        None if entries is None else pytest.approx([entry["logprob"] for entry in entries], abs=1e-6)
    )
    for name in ("finish_reason", "stop_reason", "weight_versions"):
        assert got[name] == expected[name]
    assert got["weight_versions"] == [{"version": "3", "start": 0, "end": len(got["token_ids"])}]


def test_stop_tokens_and_stop_strings_end_both_alike(published_server: VLLMProcess) -> None:
    free = plain(published_server, request(ignore_eos=True))["token_ids"]
    with_token = request(ignore_eos=True, stop_token_ids=[free[6]])
    assert fast(published_server, with_token)["stop_reason"] == free[6]
    text = {**request(ignore_eos=True), "output_mode": "text"}
    pieces = [entry["token"] for entry in plain(published_server, text)["logprobs"]["content"]]
    with_string = request(ignore_eos=True, stop=[next(piece for piece in pieces[4:] if piece.strip()).strip()])
    for body in (with_token, with_string):
        expected, got = plain(published_server, body), fast(published_server, body)
        assert got["finish_reason"] == expected["finish_reason"] == "stop"
        assert got["stop_reason"] == expected["stop_reason"]
        assert got["token_ids"] == expected["token_ids"]
        assert len(got["logprobs"]) == len(got["token_ids"]) < 24


def test_the_client_reads_both_alike(published_server: VLLMProcess) -> None:
    both = [read_completion(post(published_server, request(), accept)[1]) for accept in ("*/*", MEDIA_TYPE)]
    assert isinstance(both[0], Completion) and both[0] == both[1]


@pytest.mark.parametrize(
    "body",
    [
        request(temperature=-1.0),
        request(max_tokens=0),
        request(stop=["a"], detokenize=False),
        {**request(), "token_ids": []},
        {**request(), "token_ids": [10**6]},
        {**request(), "token_ids": random_ids(600, seed=1)},
        {**request(), "model": "another"},
        {"model": "actor"},
        b"{",
    ],
)
def test_errors_have_the_status_and_the_words_of_vllm(published_server: VLLMProcess, body: Any) -> None:
    (status, content), (fast_status, fast_content) = (
        post(published_server, body),
        post(published_server, body, MEDIA_TYPE),
    )
    assert fast_status == status and fast_content == content
    assert status in (400, 404) and json.loads(content)["error"]["message"]


def test_no_token_no_bytes(published_server: VLLMProcess) -> None:
    assert post(published_server, request(), MEDIA_TYPE, token="a-wrong-token-of-some-length")[0] == 401


def test_a_caller_that_goes_away_frees_its_request(published_server: VLLMProcess) -> None:
    for _ in range(ATTEMPTS):
        connection = connect(published_server, request(max_tokens=480, ignore_eos=True))
        while num_running(published_server) < 1 and not has_answer(connection):
            pass
        if not has_answer(connection):
            break
        # A test process that was held up finds the request done: that shows nothing, so it is tried again.
        connection.close()
    else:
        raise AssertionError(f"no request was still running, in {ATTEMPTS} attempts")
    connection.close()
    # Both take one token a step, so that the long request cannot have ended by itself in these.
    for _ in range(100):
        fast(published_server, request(max_tokens=4, ignore_eos=True))
        if num_running(published_server) == 0:
            return
    raise AssertionError("the request continues although its caller went away")


def test_the_server_found_vllm_as_it_expects_it(published_server: VLLMProcess) -> None:
    fast(published_server, request())
    log = published_server.log.read_text(errors="replace")
    assert "one by one only" not in log and "handed on to vLLM's route" not in log
