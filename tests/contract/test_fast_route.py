"""The fast route with a scripted engine: what it serves, what it hands on, and how requests end."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind
from vllm.v1.outputs import LogprobsLists

from pipelinerl.inference.fast_output import FastRoute
from pipelinerl.records.completion import (
    GENERATE_PATH,
    MEDIA_TYPE,
    PackedSpan,
    decode_completion,
    unpack_ids,
    unpack_logprobs,
)

BODY = {"model": "actor", "token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 0, "seed": 4}}
HEADERS = [(b"accept", MEDIA_TYPE.encode()), (b"content-type", b"application/json")]


def finished(**changes: Any) -> Any:
    """The last output of a request: two tokens of version 1 and one of version 2."""
    parts = [
        LogprobsLists(np.array([[7, 8]]), np.array([[-0.5, -0.1]], np.float32), np.array([2]), None),
        LogprobsLists(np.array([[9], [7]]), np.array([[-1.5], [-2.0]], np.float32), np.array([1, 1]), None),
    ]
    choice = CompletionOutput(0, "", [7, 9, 7], None, parts, finish_reason="length")  # type: ignore[arg-type]
    choice.weight_versions = [WeightVersionSpan("1", 0, 2), WeightVersionSpan("2", 2, 3)]
    for name, value in changes.items():
        setattr(choice, name, value)
    return SimpleNamespace(finished=True, outputs=[choice])


class Engine:
    """Gives `output` to every request: at once, or when the request is aborted if it is None."""

    def __init__(self, output: Any = None, refuse: Exception | None = None) -> None:
        self.requests: list[tuple[Any, Any, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.started = asyncio.Event()
        self._output, self._refuse = output, refuse
        self._queues: dict[str, asyncio.Queue[Any]] = {}

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        if self._refuse is not None:
            raise self._refuse
        self.requests.append((prompt, params, options))
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues[request_id] = queue
        if self._output is not None:
            queue.put_nowait(self._output)
        self.started.set()

        async def get() -> Any:
            output = await queue.get()
            if isinstance(output, Exception):
                raise output
            return output

        return SimpleNamespace(request_id=request_id, get=get, close=lambda: None)

    async def abort(self, request_id: str, internal: bool) -> None:
        assert internal
        self.aborted.append(request_id)
        self._queues[request_id].put_nowait(finished(finish_reason="abort", token_ids=[], logprobs=None))


class Call:
    """One request to the route; `answer` is what was sent, `handed_on` the body that reached vLLM's application."""

    def __init__(self, engine: Engine, **handler: Any) -> None:
        models = SimpleNamespace(is_base_model=lambda name: name == "actor")
        defaults = {"models": models, "request_logger": None, "force_no_detokenize": False}
        serving = SimpleNamespace(**defaults | handler)
        self._state = SimpleNamespace(engine_client=engine, serving_tokens=serving)
        self.gone = asyncio.Event()
        self.handed_on: bytes | None = None
        self.sent: list[dict[str, Any]] = []

    async def run(self, body: Any, headers: Any = HEADERS, path: str = GENERATE_PATH) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        half = len(content) // 2
        messages = [(content[:half], True), (content[half:], False)]

        async def receive() -> dict[str, Any]:
            if messages:
                part, more = messages.pop(0)
                return {"type": "http.request", "body": part, "more_body": more}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            message = {"more_body": True, "body": b""}
            self.handed_on = b""
            while message["more_body"]:
                message = await receive()
                self.handed_on += message["body"]

        application = SimpleNamespace(state=self._state)
        scope = {"type": "http", "path": path, "method": "POST", "headers": headers, "app": application}
        await FastRoute(app)(scope, receive, send)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return self.sent[1]["body"]


async def test_arrays_come_back_and_the_engine_is_asked_for_little() -> None:
    engine = Engine(finished())
    call = Call(engine)
    await call.run({**BODY, "cache_salt": "s", "priority": 2})
    assert call.status == 200
    assert dict(call.sent[0]["headers"])[b"content-type"] == MEDIA_TYPE.encode()
    assert dict(call.sent[0]["headers"])[b"content-length"] == str(len(call.body)).encode()
    packed = decode_completion(call.body)
    assert unpack_ids(packed.token_ids) == [7, 9, 7]
    assert packed.logprobs is not None and unpack_logprobs(packed.logprobs) == [-0.5, -1.5, -2.0]
    assert (packed.finish_reason, packed.stop_reason) == ("length", None)
    assert packed.weight_versions == [PackedSpan("1", 0, 2), PackedSpan("2", 2, 3)]
    ((prompt, params, options),) = engine.requests
    assert (prompt["prompt_token_ids"], prompt["cache_salt"], options["priority"]) == ([1, 2], "s", 2)
    assert (params.max_tokens, params.seed, params.logprobs) == (3, 4, 0)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.flat_logprobs and not params.detokenize


@pytest.mark.parametrize(
    "body",
    [
        {**BODY, "stream": True},
        {**BODY, "sampling_params": {**BODY["sampling_params"], "n": 2}},  # type: ignore[dict-item]
        {**BODY, "sampling_params": {**BODY["sampling_params"], "prompt_logprobs": 0}},  # type: ignore[dict-item]
        {**BODY, "sampling_params": {"max_tokens": 3, "logprobs": 5}},
        {**BODY, "sampling_params": {"max_tokens": 3, "flat_logprobs": True}},
        {**BODY, "sampling_params": {"logprobs": 0}},
        {**BODY, "sampling_params": {"max_tokens": -3}},
        {**BODY, "sampling_params": {"max_tokens": 3, "temperature": "hot"}},
        {**BODY, "sampling_params": {"max_tokens": 3, "stop": ["a"], "detokenize": False}},
        {**BODY, "sampling_params": 3},
        {**BODY, "token_ids": []},
        {**BODY, "token_ids": [-1]},
        {**BODY, "token_ids": "abc"},
        {**BODY, "model": "another"},
        {**BODY, "cache_salt": ""},
        b"{",
        b"\xff\xff",
    ],
)
async def test_unusual_requests_reach_vllm_byte_by_byte(body: Any) -> None:
    engine = Engine(finished())
    call = Call(engine)
    await call.run(body)
    assert call.handed_on == (body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (engine.requests, call.sent) == ([], [])


@pytest.mark.parametrize(
    "headers",
    [
        HEADERS[1:],
        HEADERS[:1],
        [(b"accept", b"*/*"), HEADERS[1]],
        [*HEADERS, (b"x-request-id", b"mine")],
        [*HEADERS, (b"traceparent", b"00-1-1-00")],
    ],
)
async def test_other_callers_are_not_its_business(headers: Any) -> None:
    engine = Engine(finished())
    call = Call(engine)
    await call.run(BODY, headers)
    assert call.handed_on == json.dumps(BODY).encode() and engine.requests == []
    await (other := Call(engine)).run(BODY, path="/v1/completions")
    assert other.handed_on == json.dumps(BODY).encode() and engine.requests == []


async def test_what_the_engine_refuses_is_answered_by_vllm() -> None:
    await (call := Call(Engine(refuse=ValueError("the prompt is too long")))).run(BODY)
    assert call.handed_on == json.dumps(BODY).encode()


async def test_a_caller_that_goes_away_frees_the_request() -> None:
    engine = Engine()
    call = Call(engine)
    task = asyncio.create_task(call.run(BODY))
    await engine.started.wait()
    call.gone.set()
    await asyncio.wait_for(task, 60)
    assert len(engine.aborted) == 1
    assert decode_completion(call.body).finish_reason == "abort"  # nobody reads it


async def test_a_cancelled_request_is_freed() -> None:
    engine = Engine()
    task = asyncio.create_task(Call(engine).run(BODY))
    await engine.started.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.aborted) == 1


async def test_an_engine_that_fails_is_a_server_error() -> None:
    engine = Engine(RuntimeError("the engine is dead"))
    await (call := Call(engine)).run(BODY)
    assert call.status == 500 and b"the engine is dead" in call.body
    assert len(engine.aborted) == 1
    await (call := Call(Engine(finished(finish_reason="error")))).run(BODY)
    assert call.status == 500


async def test_missing_logprobs_are_an_error_not_a_shorter_answer() -> None:
    parts = finished().outputs[0].logprobs[:1]
    await (call := Call(Engine(finished(logprobs=parts)))).run(BODY)
    assert call.status == 500 and b"log-probs of 2 of 3 tokens are missing" in call.body
