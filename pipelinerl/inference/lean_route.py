"""Completions for training at little cost to the API process: `/inference/v1/generate` for callers that accept bytes.

`ServerMiddleware` puts `LeanRoute` inside the token check. A request whose `Accept` names our media type is
read here, given to the engine, and answered with arrays (see `records.completion`) instead of one JSON object a token.
It is the same path as vLLM's own, so there is nothing to discover: a plain vLLM ignores the header and answers JSON,
and clients read both. Whatever is out of the ordinary (streaming, several outputs, log-probs of the prompt, an option
that is not listed below) and whatever the engine refuses goes on to vLLM's own route with the same bytes: it serves it,
or finds the right status and words. Waits for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any

import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from pipelinerl.inference.asgi import answer, answer_json, read_body, with_body_again
from pipelinerl.inference.auth import App, Receive, Scope, Send
from pipelinerl.inference.sampled_logprobs import keep_arrays, sampled_logprobs
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE, PackedSpan, encode_completion, pack_ids

logger = logging.getLogger(__name__)

#: Sampling parameters that change nothing about the shape of the answer.
PLAIN_PARAMETERS = frozenset(
    (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "ignore_eos"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "detokenize", "skip_special_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "logit_bias"),
        *("allowed_token_ids", "repetition_detection"),
    )
)
#: Headers that mean something to vLLM's route.
_SPECIAL_HEADERS = frozenset(
    (b"x-request-id", b"x-data-parallel-rank", b"x-session-id", b"x-vllm-priority", b"traceparent", b"tracestate")
)
#: What a request that is at fault, or an engine that is full, raises.
_REFUSALS = (ValueError, VLLMClientError, GracefulHTTPError)


class LeanRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request that this route serves; any other key belongs to vLLM's."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0


_decode = msgspec.json.Decoder(LeanRequest).decode


class LeanRoute:
    """Answers the requests that ask for it and are plain, and hands everything else on."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._numbers = itertools.count()
        self._told = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _asks_for_bytes(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(receive)
        except ConnectionError:
            return
        state = scope["app"].state
        queue = await self._submit(body, state)
        if queue is None:
            await self._app(scope, with_body_again(body, receive), send)
            return
        engine = state.engine_client
        watch = asyncio.ensure_future(_abort_when_gone(engine, queue.request_id, receive))
        try:
            output = await queue.get()
            while not output.finished:
                output = await queue.get()
        except BaseException as error:
            with contextlib.suppress(Exception):  # the engine may be dead; the first error is what counts
                await engine.abort(queue.request_id, internal=True)
            if not isinstance(error, Exception):
                raise
            logger.exception("the engine failed a request")
            await answer_json(send, 500, _error(f"{type(error).__name__}: {error}"))
            return
        finally:
            watch.cancel()
            queue.close()
        await _answer(send, output)

    async def _submit(self, body: bytes, state: Any) -> Any:
        """Give the request to the engine; returns the queue of its outputs, or None if vLLM's route has to see it."""
        try:
            request = _decode(body)
            if not _is_plain(request, state):
                return None
            params = msgspec.convert(request.sampling_params, SamplingParams, str_keys=True)  # as in JSON
            params.flat_logprobs = True
            params.output_kind = RequestOutputKind.FINAL_ONLY
            params.skip_clone = True  # nobody else has it
            if not params.stop:
                params.detokenize = False
            engine = state.engine_client
            queue = await engine.add_request(
                f"lean-{next(self._numbers)}",
                tokens_input(request.token_ids, cache_salt=request.cache_salt),
                params,
                priority=request.priority,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM's route meets it as well and words the answer
            level = logging.DEBUG if isinstance(error, _REFUSALS) else logging.WARNING
            logger.log(level, "handed on to vLLM's route: %s: %s", type(error).__name__, error)
            return None
        if params.logprobs is not None and not keep_arrays(engine, queue.request_id) and not self._told:
            self._told = True
            logger.warning("this vLLM collects log-probs one by one only: answers take more CPU time than they should")
        return queue


def _asks_for_bytes(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["path"] != GENERATE_PATH or scope["method"] != "POST":
        return False
    asks = False
    is_json = False
    for name, value in scope["headers"]:
        if name in _SPECIAL_HEADERS:
            return False
        asks |= name == b"accept" and MEDIA_TYPE.encode() in value
        is_json |= name == b"content-type" and value.lower().split(b";", 1)[0] == b"application/json"
    return asks and is_json


def _is_plain(request: LeanRequest, state: Any) -> bool:
    """Whether an answer with nothing but ids, log-probs of the sampled tokens, ending and versions is a whole one."""
    parameters = request.sampling_params
    handler = state.serving_tokens
    return (
        handler is not None
        and parameters.keys() <= PLAIN_PARAMETERS
        and type(parameters.get("max_tokens")) is int  # left out, vLLM's route fills it in
        and (parameters.get("logprobs") is None or parameters["logprobs"] == 0)
        and bool(request.token_ids)
        and min(request.token_ids) >= 0
        and request.cache_salt != ""
        and (not request.model or handler.models.is_base_model(request.model))
        and handler.request_logger is None
        and not handler.force_no_detokenize
        and not getattr(state, "enable_server_load_tracking", False)
    )


async def _abort_when_gone(engine: Any, request_id: str, receive: Receive) -> None:
    """Free the request in the engine when its caller goes away; its queue then gets an aborted output."""
    while (await receive())["type"] != "http.disconnect":
        pass
    # The aborted output ends the route's wait, and with it this task.
    await asyncio.shield(engine.abort(request_id, internal=True))


async def _answer(send: Send, output: Any) -> None:
    (choice,) = output.outputs
    if choice.finish_reason == "error":
        await answer_json(send, 500, _error("the engine failed this request"))
        return
    logprobs = None
    if choice.logprobs is not None:
        logprobs = sampled_logprobs(choice.logprobs, choice.token_ids)
        if len(logprobs) != len(choice.token_ids):
            # The scheduler takes them away where the version of a token is not known.
            text = f"log-probs of {len(choice.token_ids) - len(logprobs)} of {len(choice.token_ids)} tokens are missing"
            await answer_json(send, 500, _error(text))
            return
    spans = choice.weight_versions
    body = encode_completion(
        pack_ids(choice.token_ids),
        None if logprobs is None else logprobs.astype("<f4", copy=False).tobytes(),
        choice.finish_reason,
        choice.stop_reason,
        None if spans is None else [PackedSpan(span.version, span.start, span.end) for span in spans],
    )
    await answer(send, 200, body, MEDIA_TYPE)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "code": 500}}
