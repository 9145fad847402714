"""A server that answers like our vLLM servers, with scripted tokens and injected faults, in a thread.

It takes part in weight transfers over gloo for real and keeps what it received in `tensors`. One contract test runs
the same assertions on it and on the real server.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch
from aiohttp import web

from pipelinerl.records.completion import MEDIA_TYPE, PackedSpan, encode_completion
from pipelinerl.weights.buffers import metas_of, receive_buffers, update_problems
from pipelinerl.weights.link import UPDATE_PATH
from pipelinerl.weights.manifest import ServerModel
from pipelinerl.weights.sync import PHASES
from pipelinerl.weights.transport import Receiver, open_receiver

Script = Callable[[dict[str, Any]], list[int]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Fault:
    """What happens instead of a proper answer: an HTTP status with a text, a closed socket, or silence.

    `is_late`: after the server has done what it was asked to do.
    """

    kind: Literal["status", "close", "hang"]
    status: int = 500
    text: str = "injected fault"
    is_late: bool = False


def count_up(body: dict[str, Any]) -> list[int]:
    """The default script: `max_tokens` ids that count up from 10."""
    return [10 + index % 100 for index in range(int(body["sampling_params"].get("max_tokens", 16)))]


class FakeServer:
    """Context manager; `url` and `token` are those of a real server.

    Args:
        expected: {name: shape} of the model; None: not checked.
        tied: whether `lm_head.weight` may be left out.
        script: the output ids for a request body.
        token_delay_s: seconds per output token, so that updates can fall into a sequence.
        logprob: log-prob of every token.
        dtype: what it says that its weights are in; it keeps what it gets.
        info: what else it says of itself: `adapter_rank` and `base_checksum`, as a server that gets adapters.
    """

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        tied: bool = True,
        script: Script = count_up,
        token_delay_s: float = 0.0,
        logprob: float = -0.5,
        token: str = "fake-server-token-0123456789",
        dtype: str = "float32",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self._dtype = dtype
        self._info = dict(info or {})
        self.token = token
        self.url = ""
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.paused = False
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.max_concurrent = 0
        self._expected = expected
        self._tied = tied
        self._script = script
        self._delay_s = token_delay_s
        self._logprob = logprob
        self._faults: dict[str, list[Fault]] = {}
        self._group: Receiver | None = None
        self._open = False
        self._active = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._running: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._serve_thread, name="fake-server", daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        if not self._ready.wait(120):
            raise RuntimeError("fake server: it did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server as if its process had died. May be called twice."""
        if self._stopping is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        if self._group is not None:
            self._group.close()
        self._thread.join(120)

    def inject(self, path: str, *faults: Fault) -> None:
        """The next calls of `path` meet these faults, one each."""
        self._faults.setdefault(path, []).extend(faults)

    def _serve_thread(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping, self._running = asyncio.Event(), asyncio.Event()
        self._running.set()
        app = web.Application(middlewares=[self._guard])
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/pause"): self._pause,
            ("GET", "/is_paused"): self._is_paused,
            ("GET", "/get_world_size"): self._world_size,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/collective_rpc"): self._rpc,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", UPDATE_PATH): self._update,
            ("POST", "/inference/v1/generate"): self._generate,
        }
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "missing or wrong token"}, status=401)
        self.calls.append(request.path)
        faults = self._faults.get(request.path)
        if not faults:
            return await handler(request)
        fault = faults.pop(0)
        if fault.is_late:
            await handler(request)
        elif request.path == UPDATE_PATH:
            self._freeze()
        if fault.kind == "status":
            return web.json_response({"error": {"message": fault.text}}, status=fault.status)
        if fault.kind == "hang":
            assert self._stopping is not None
            await self._stopping.wait()
        if request.transport is not None:
            request.transport.close()
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{model_name="actor"}} {float(self._active)}\n')

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "actor", "object": "model"}]})

    async def _pause(self, request: web.Request) -> web.Response:
        self._freeze()
        return web.json_response({"status": "paused"})

    def _freeze(self) -> None:
        assert self._running is not None
        self.paused = True
        self._running.clear()

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _rpc(self, request: web.Request) -> web.Response:
        method = (await request.json())["method"]
        if method == "pipelinerl_model_info":
            return web.json_response({"results": [msgspec.to_builtins(self._model())]})
        if method == "pipelinerl_abort_update":
            was_open, self._open = self._open, False
            self._leave_group()
            return web.json_response({"results": [{"was_open": was_open}]})
        return _error(500, f"unknown method {method}")

    def _model(self) -> ServerModel:
        return ServerModel(self._expected, self._tied, self._dtype, **self._info)

    async def _init(self, request: web.Request) -> web.Response:
        details = (await request.json())["init_info"]["details"]
        self._leave_group()
        try:
            self._group = await asyncio.to_thread(open_receiver, details, 0, torch.device("cpu"))
        except RuntimeError as error:
            return _error(500, str(error))
        return web.json_response({"message": "Weight transfer initialized"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        info = body["update_info"]
        self._freeze()
        if self._open:
            return _error(500, "start_weight_update called while a weight update is already active")
        self._open, received = True, dict[str, torch.Tensor]()
        try:
            if self._group is None:
                raise RuntimeError("weight transfer is not initialized")
            metas = metas_of(info["tensors"])
            receive, load = self._group.receive, received.update
            await asyncio.to_thread(receive_buffers, metas, info["chunk_bytes"], info["pass_id"], receive, load)
        except (RuntimeError, ValueError, KeyError) as error:
            self._open = False
            return _error(500, str(error))
        shapes = {name: tuple(tensor.shape) for name, tensor in received.items()}
        if problems := update_problems(self._model(), shapes):
            return _error(500, f"the update left layers without all of their weights: {problems}")
        assert self._running is not None
        self.tensors, self._open, self.version = received, False, body["weight_version"]
        if body["resumes"]:
            self.paused = False
            self._running.set()
        return web.json_response({"seconds": dict.fromkeys(PHASES, 0.001)})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not isinstance(body.get("token_ids"), list) or not body["token_ids"] or "sampling_params" not in body:
            return _error(400, "token_ids: a list of at least one id is needed, and sampling_params")
        self.requests.append(body)
        self._active += 1
        self.max_concurrent = max(self.max_concurrent, self._active)
        try:
            ids, spans = await self._sample(body)
        finally:
            self._active -= 1
        answer = self._answer(body, ids, spans)
        if MEDIA_TYPE in request.headers.get("Accept", "") and answer["prompt_logprobs"] is None:
            return web.Response(body=packed(answer), content_type=MEDIA_TYPE)
        return web.json_response(answer)

    async def _sample(self, body: dict[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
        assert self._running is not None
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        for token in self._script(body)[: int(body["sampling_params"].get("max_tokens", 16))]:
            await asyncio.sleep(self._delay_s)
            await self._running.wait()
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(ids), "end": len(ids)})
            ids.append(token)
            spans[-1]["end"] = len(ids)
        return ids, spans

    def _answer(self, body: dict[str, Any], ids: list[int], spans: list[dict[str, Any]]) -> dict[str, Any]:
        params = body["sampling_params"]
        logprobs = None
        if params.get("logprobs") is not None:
            entry = {"logprob": self._logprob, "rank": 1}
            content = [{"token_id": t, **entry, "top_logprobs": [{"token_id": t, **entry}]} for t in ids]
            logprobs = {"content": content}
        prompt_logprobs = None
        if params.get("prompt_logprobs") is not None:
            entry = {"logprob": self._logprob, "rank": 1, "decoded_token": ""}
            prompt_logprobs = [None, *({str(token): entry} for token in body["token_ids"][1:])]
        is_cut = len(ids) >= int(params.get("max_tokens", 16))
        choice = {
            "index": 0,
            "finish_reason": "length" if is_cut else "stop",
            "stop_reason": None,
            "token_ids": ids,
            "weight_versions": spans,
            "logprobs": logprobs,
        }
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(ids)}
        return {
            "request_id": f"generate-tokens-{uuid.uuid4().hex[:16]}",
            "model": "actor",
            "created": int(time.time()),
            "usage": {**usage, "total_tokens": sum(usage.values())},
            "prompt_logprobs": prompt_logprobs,
            "choices": [choice],
        }

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def packed(answer: dict[str, Any]) -> bytes:
    """The answer in the form that our servers give to a client that accepts it."""
    (choice,) = answer["choices"]
    logprobs = None
    if choice["logprobs"] is not None:
        logprobs = array("f", [entry["logprob"] for entry in choice["logprobs"]["content"]]).tobytes()
    spans = [PackedSpan(**span) for span in choice["weight_versions"]]
    ids = array("i", choice["token_ids"]).tobytes()
    return encode_completion(ids, logprobs, choice["finish_reason"], choice["stop_reason"], spans)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "Fake", "code": status}}, status=status)
