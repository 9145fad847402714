"""Tokens and log-probs of training requests on their way from the engine to the caller, at little cost.

vLLM ships every token of every request by itself, with three small arrays of log-probs, turns each into Python objects
in the API process, and writes a JSON object for it. With hundreds of requests that costs more than the model does.
Three parts avoid it; other requests are processed as vLLM does:

| part | process | what it does |
|---|---|---|
| `OutputHold` | engine | holds outputs back until the request ends, many tokens are held, or the weights may change |
| `keep_arrays` | API | keeps the engine's arrays of log-probs as they come |
| `FastRoute` | API | `/inference/v1/generate` for callers that accept bytes: answers arrays (`records.completion`) |

Tokens are labeled with the version that is current when they are shipped, so nothing may be held over a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from pipelinerl.inference.auth import App, Receive, Scope, Send
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE, PackedSpan, encode_completion, pack_ids

logger = logging.getLogger(__name__)

#: Environment variable with another number than the default; 0 or 1 ship every token at once.
HELD_TOKENS_VARIABLE = "PIPELINERL_HELD_TOKENS"
#: Tokens that are held back at most; the cost by token has long vanished by then.
DEFAULT_HELD_TOKENS = 64
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


def may_wait(request: Request) -> bool:
    """Whether only the end of this request matters to whoever sent it: no streaming, no stop strings (they are found
    in the text, in the API process)."""
    parameters = request.sampling_params
    return (
        parameters is not None
        and parameters.output_kind == RequestOutputKind.FINAL_ONLY
        and not parameters.stop
        and parameters.prompt_logprobs is None
    )


class StepLogprobs:
    """The log-probs of one step for vLLM's scheduler, which cuts out each request's own.

    Of one token it gets three plain numbers `(id, log-prob, rank)`: to cut three arrays of one element for every token
    and to join them again costs several times as much. `as_lists` makes them what they were.
    """

    def __init__(self, whole: LogprobsLists) -> None:
        self._whole = whole
        self._rows = list(
            zip(
                whole.logprob_token_ids[:, 0].tolist(),
                whole.logprobs[:, 0].tolist(),
                whole.sampled_token_ranks.tolist(),
                strict=True,
            )
        )

    def slice_request(self, index: int, num_positions: int) -> Any:
        return self._rows[index] if num_positions == 1 else self._whole.slice_request(index, num_positions)


def cheap_to_cut(logprobs: Any) -> Any:
    """`StepLogprobs` if there is one column and one token a request, else what was given."""
    if not isinstance(logprobs, LogprobsLists) or logprobs.cu_num_generated_tokens is not None:
        return logprobs
    return StepLogprobs(logprobs) if logprobs.logprobs.shape[1] == 1 else logprobs


def as_lists(parts: list[Any]) -> LogprobsLists:
    """One `LogprobsLists` of the parts of one request, of either form.

    A step has as many columns as the request of it that wants most. A request's own come first and are in every part,
    so that what is beyond the narrowest part was for others.
    """
    if all(type(part) is tuple for part in parts):
        ids, values, ranks = zip(*parts, strict=True)
        return LogprobsLists(
            np.array(ids, np.int32)[:, None], np.array(values, np.float32)[:, None], np.array(ranks, np.int32), None
        )
    lists = [as_lists([part]) if type(part) is tuple else part for part in parts]
    if len(lists) == 1:
        return lists[0]
    columns = min(part.logprobs.shape[1] for part in lists)
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids[:, :columns] for part in lists]),
        np.concatenate([part.logprobs[:, :columns] for part in lists]),
        np.concatenate([part.sampled_token_ranks for part in lists]),
        None,
    )


class OutputHold:
    """Outputs that are held back, by request."""

    def __init__(self, max_tokens: int = DEFAULT_HELD_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def pass_on(self, outputs: Iterable[EngineCoreOutput], requests: Mapping[str, Request]) -> list[EngineCoreOutput]:
        """Take the outputs of one step; returns those that go out now, each with what was held of its request.

        Args:
            requests: the scheduler's requests.
        """
        ready = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                request = requests.get(output.request_id)
                if request is not None and _plain(output) and may_wait(request):
                    # The first token goes out at once: it carries what is known about the prompt.
                    self._held[output.request_id] = []
                ready.append(merge([output]))
            elif _plain(output) and len(held) + 1 < self._max_tokens:
                held.append(output)
            else:
                ready.append(merge([*held, output]))
                held.clear()
                if output.finished:
                    del self._held[output.request_id]
        return ready

    def release(self) -> list[EngineCoreOutput]:
        """Everything that is held, one output a request; later outputs of the same requests are held again."""
        released = [merge(held) for held in self._held.values() if held]
        for held in self._held.values():
            held.clear()
        return released

    def void_logprobs(self) -> int:
        """Take the log-probs away from what is held, so that these samples are refused; returns the requests hit."""
        hit = 0
        for held in self._held.values():
            hit += bool(held)
            held[:] = [msgspec.structs.replace(output, new_logprobs=None) for output in held]
        return hit

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is held of requests that end without an output (aborted ones)."""
        for request_id in request_ids:
            self._held.pop(request_id, None)


def merge(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output with the tokens and log-probs of several of the same request, in order; the last one's ending."""
    last = outputs[-1]
    parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if len(outputs) == 1:
        if type(last.new_logprobs) is tuple:
            last.new_logprobs = as_lists(parts)
        return last
    tokens = [token for output in outputs for token in output.new_token_ids]
    logprobs = as_lists(parts) if parts else None
    return msgspec.structs.replace(last, new_token_ids=tokens, new_logprobs=logprobs)


def _plain(output: EngineCoreOutput) -> bool:
    """Nothing but tokens and log-probs, in the middle of a request."""
    return (
        output.finish_reason is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.kv_transfer_params is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and not output.mm_cache_miss_hashes
    )


class ArrayLogprobs(LogprobsProcessor):
    """Collects what the engine sends. Its `logprobs`, which vLLM hands on unseen, is a list of `LogprobsLists`."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self.logprobs.append(logprobs_lists)  # type: ignore[union-attr,arg-type]


def keep_arrays(engine: Any, request_id: str) -> bool:
    """Let the engine client collect this request's log-probs as arrays; False if that is not possible.

    Args:
        engine: vLLM's engine client in this process.
        request_id: the inner id of a request that asked for `logprobs=0` and `flat_logprobs`.
    """
    states: dict[str, Any] = getattr(getattr(engine, "output_processor", None), "request_states", {})
    state: Any = states.get(request_id)
    present = getattr(state, "logprobs_processor", None)
    if type(present) is not LogprobsProcessor or not isinstance(present.logprobs, FlatLogprobs):
        return False
    state.logprobs_processor = ArrayLogprobs(
        tokenizer=None,
        logprobs=_parts_of(present.logprobs),  # type: ignore[arg-type]
        prompt_logprobs=None,
        cumulative_logprob=None,
        num_logprobs=present.num_logprobs,
        num_prompt_logprobs=None,
    )
    return True


def sampled_logprobs(collected: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Return the log-probs of `token_ids`, float32 of shape (tokens that have one,).

    Args:
        collected: `logprobs` of a completion with `flat_logprobs`, its processor replaced or not.
        token_ids: the sampled tokens. One whose log-prob is said to be of another token gets NaN, which no client
            takes for a log-prob.
    """
    parts = _parts_of(collected) if isinstance(collected, FlatLogprobs) else collected
    if not parts:
        return np.zeros(0, np.float32)
    # The sampler puts the sampled token first.
    values = np.concatenate([part.logprobs[:, 0] for part in parts]).astype(np.float32, copy=False)
    named = np.concatenate([part.logprob_token_ids[:, 0] for part in parts])
    if len(named) == len(token_ids) and not np.array_equal(named, token_ids):
        values = np.where(named == np.asarray(token_ids), values, np.float32(np.nan))
    return values


def _parts_of(flat: FlatLogprobs) -> list[LogprobsLists]:
    """What vLLM's own processor has collected, as one part; none of nothing."""
    if not flat.start_indices:
        return []
    ids = np.asarray([flat.token_ids[index] for index in flat.start_indices])
    values = np.asarray([flat.logprobs[index] for index in flat.start_indices], np.float32)
    return [LogprobsLists(ids[:, None], values[:, None], np.zeros(len(ids), np.int32), None)]


class FastRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request that this route serves; any other key belongs to vLLM's."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0


_decode = msgspec.json.Decoder(FastRequest).decode


class FastRoute:
    """Answers the requests that ask for it and are plain, and hands everything else on.

    It has the path of vLLM's own route, so there is nothing to discover: a plain vLLM ignores the `Accept` header and
    answers JSON, and clients read both. Whatever is out of the ordinary (streaming, several outputs, log-probs of the
    prompt, an unlisted option) and whatever the engine refuses goes to vLLM's route with the same bytes.
    """

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
            await self._app(scope, _with_body_again(body, receive), send)
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
            await send_error(send, f"{type(error).__name__}: {error}")
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
                f"fast-{next(self._numbers)}",
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
            logger.warning("this vLLM collects log-probs one at a time: responses take more CPU time than necessary")
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


def _is_plain(request: FastRequest, state: Any) -> bool:
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
        await send_error(send, "the engine failed this request")
        return
    logprobs = None
    if choice.logprobs is not None:
        logprobs = sampled_logprobs(choice.logprobs, choice.token_ids)
        if len(logprobs) != len(choice.token_ids):
            # The scheduler takes them away where the version of a token is not known.
            text = f"log-probs of {len(choice.token_ids) - len(logprobs)} of {len(choice.token_ids)} tokens are missing"
            await send_error(send, text)
            return
    spans = choice.weight_versions
    body = encode_completion(
        pack_ids(choice.token_ids),
        None if logprobs is None else logprobs.astype("<f4", copy=False).tobytes(),
        choice.finish_reason,
        choice.stop_reason,
        None if spans is None else [PackedSpan(span.version, span.start, span.end) for span in spans],
    )
    await _send_whole(send, 200, body, MEDIA_TYPE)


async def send_error(send: Send, message: str) -> None:
    """Answer 500 in the form of vLLM's errors."""
    content = {"error": {"message": message, "type": "InternalServerError", "code": 500}}
    await send_json(send, 500, content)


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request.

    Raises:
        ConnectionError: the caller went away first.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client disconnected")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_body_again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for the inner application, which has not seen the body yet."""
    bodies = [body]

    async def receive_again() -> Any:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return receive_again


async def _send_whole(send: Send, status: int, body: bytes, media_type: str) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a JSON object."""
    await _send_whole(send, status, json.dumps(content).encode(), "application/json")
