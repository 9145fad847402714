"""Token ids in, token ids out: one completion from a server, checked and retried.

Called by `llm_async_generate` (and by the log-prob probe of evaluation tools); waits for the server, at most
`request_timeout_s` per attempt and `max_retries` + 1 attempts.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, TypeGuard, cast

import aiohttp
import msgspec

from pipelinerl.errors import RetryableRolloutError, RolloutError
from pipelinerl.llm.connections import BrokenResponseError, Connections
from pipelinerl.llm.retry import EndRunError, Fault, Verdict, classify, reason_of, retry_delay_s
from pipelinerl.llm.trainable import TrainableLLM
from pipelinerl.records import VersionSpan

GENERATE_PATH = "/inference/v1/generate"
# The server writes NaN and -inf as -9999.0.
LOWEST_LOGPROB = -9998.0
_FINISHED = {"stop": True, "length": False, "repetition": False}
_QUOTED_CHARACTERS = 300
# What vLLM calls its weights before the first update.
_UNLABELLED = "default"


class WireSpan(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


# One for every token: not tracked by the garbage collector, which they would keep busy.
class WireLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None = None


class WireLogprobs(msgspec.Struct):
    content: list[WireLogprob] | None = None


class WireChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WireSpan] | None = None


class WireResponse(msgspec.Struct):
    choices: list[WireChoice]


class Completion(msgspec.Struct, frozen=True):
    """One checked completion: ids, log-probs and spans agree in length."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_string: str | None
    version_spans: list[VersionSpan]


_decode_response = msgspec.json.Decoder(WireResponse).decode
_encode_request = msgspec.json.Encoder().encode


def is_finished(finish_reason: str) -> bool:
    """Return whether the model ended the sequence itself (end token or stop string) rather than running out of room."""
    return _FINISHED.get(finish_reason, False)


def open_session() -> aiohttp.ClientSession:
    """Return a session for internal servers: no limit on connections, no proxy from the environment, no cookies.

    Limits on what is in flight are the scheduler's; a second one here would only hide queueing from it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, ttl_dns_cache=300, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def complete(llm: TrainableLLM, prompt_ids: list[int], session: aiohttp.ClientSession) -> Completion:
    """Return one completion of `prompt_ids`.

    Raises:
        RolloutError: the context is full (before any request is sent), the server refuses this request, or its answer
            cannot be trained on.
        RetryableRolloutError: every attempt failed for a passing reason.
        EndRunError: the server's answer means that no request can ever succeed.
    """
    body = _encode_request(request_body(llm, prompt_ids))
    url = llm.get_base_url() + GENERATE_PATH
    attempt = 0
    while True:
        problem, detail, retry_after_s = await _post(llm, session, url, body)
        if problem is None:
            completion = read_completion(detail, llm.collect_logprobs, llm.unlabelled_version)
            if isinstance(completion, Completion):
                return completion
            problem, detail = completion, b"no complete answer"
        text = f"{url}: {reason_of(problem)}: {detail[:_QUOTED_CHARACTERS].decode(errors='replace')}"
        verdict = classify(problem)
        if verdict is Verdict.END_RUN:
            llm.counters.fatal = text
            raise EndRunError(text)
        if verdict is Verdict.FAIL_ROLLOUT:
            raise RolloutError(reason_of(problem), text)
        if attempt >= llm.max_retries:
            raise RetryableRolloutError(reason_of(problem), f"{text} ({attempt + 1} attempts)")
        jitter = ((llm.seed or 0) >> 7) % 1024 / 1024
        llm.counters.retries += 1
        await asyncio.sleep(retry_delay_s(attempt, jitter, retry_after_s))
        attempt += 1


def request_body(llm: TrainableLLM, prompt_ids: list[int]) -> dict[str, Any]:
    """Return the request for one completion of `prompt_ids`.

    Raises:
        RolloutError: `context_overflow` or `empty_prompt`, which the server would have to refuse.
    """
    if not prompt_ids:
        raise RolloutError("empty_prompt", "the prompt has no token")
    sampling = dict(llm.parameters)
    if llm.max_model_len is not None:
        room = llm.max_model_len - len(prompt_ids)
        if room < 1:
            raise RolloutError(
                "context_overflow", f"prompt of {len(prompt_ids)} tokens, but the context has {llm.max_model_len}"
            )
        sampling["max_tokens"] = min(int(sampling.get("max_tokens", room)), room)
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if llm.collect_logprobs:
        sampling["logprobs"] = 0
    seed = llm.next_request_seed()
    if seed is not None:
        sampling["seed"] = seed
    return {"model": llm.model_name, "token_ids": prompt_ids, "sampling_params": sampling}


async def _post(
    llm: TrainableLLM, session: aiohttp.ClientSession, url: str, body: bytes
) -> tuple[int | Fault | None, bytes, float | None]:
    """Send one request. Return (None, body, None), or the problem with its text and the server's `Retry-After`."""
    if llm.connections is not None and url.startswith("http://"):
        return await _post_plainly(llm, llm.connections, url, body)
    headers = {"Content-Type": "application/json"}
    if llm.token:
        headers["Authorization"] = f"Bearer {llm.token}"
    timeout = aiohttp.ClientTimeout(total=llm.request_timeout_s)
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            content = await response.read()
            if response.status == 200:
                return None, content, None
            return response.status, content, _seconds(response.headers.get("Retry-After"))
    except TimeoutError:
        return Fault.TIMEOUT, b"no answer in time", None
    except aiohttp.ClientConnectorError as error:
        return Fault.REFUSED, str(error).encode(), None
    except (aiohttp.ClientError, ConnectionError) as error:
        return Fault.DISCONNECTED, (str(error) or type(error).__name__).encode(), None


async def _post_plainly(
    llm: TrainableLLM, connections: Connections, url: str, body: bytes
) -> tuple[int | Fault | None, bytes, float | None]:
    """The same over the worker's own connections."""
    headers = b"Authorization: Bearer %b\r\n" % llm.token.encode() if llm.token else b""
    try:
        response = await connections.post(url, body, headers, llm.request_timeout_s)
    except TimeoutError:
        return Fault.TIMEOUT, b"no answer in time", None
    except BrokenResponseError as error:
        return Fault.DISCONNECTED, str(error).encode(), None
    except OSError as error:
        return Fault.REFUSED, str(error).encode(), None
    if response.status == 200:
        return None, response.body, None
    return response.status, response.body, _seconds(response.retry_after)


def _seconds(value: str | None) -> float | None:
    """Read a `Retry-After` in seconds; its other form, a date, is ignored."""
    return float(value) if value is not None and value.strip().isdigit() else None


def read_completion(
    content: bytes, collect_logprobs: bool = True, unlabelled_version: int | None = None
) -> Completion | Fault:
    """Check a server's answer and return it, or the fault (aborted, empty) for which the request is tried again.

    Args:
        content: of the answer.
        collect_logprobs: whether log-probs were asked for.
        unlabelled_version: of a server that was never given a version; None refuses its tokens.

    Raises:
        RolloutError: `bad_response`, `bad_finish_reason`, `length_mismatch`, `missing_logprobs`, `bad_logprob`,
            `unversioned` or `bad_version_spans`. Nothing is shortened or filled in.
    """
    try:
        response = _decode_response(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RolloutError("bad_response", str(error)) from error
    if len(response.choices) != 1:
        raise RolloutError("bad_response", f"{len(response.choices)} choices, expected 1")
    choice = response.choices[0]
    if choice.finish_reason in (None, "abort", "error"):
        return Fault.ABORTED
    if choice.finish_reason not in _FINISHED:
        raise RolloutError("bad_finish_reason", str(choice.finish_reason))
    if not choice.token_ids:
        return Fault.EMPTY
    return Completion(
        token_ids=choice.token_ids,
        logprobs=_checked_logprobs(choice) if collect_logprobs else [],
        finish_reason=choice.finish_reason,
        stop_string=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        version_spans=_checked_spans(choice, unlabelled_version),
    )


def _checked_logprobs(choice: WireChoice) -> list[float]:
    ids = choice.token_ids or []
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content is None:
        raise RolloutError("missing_logprobs", f"no log-probs for {len(ids)} tokens")
    if len(content) != len(ids):
        raise RolloutError("length_mismatch", f"{len(content)} log-probs for {len(ids)} tokens")
    logprobs = [entry.logprob for entry in content]
    if [entry.token_id for entry in content] == ids and _all_usable(logprobs):
        return logprobs
    for token_id, entry in zip(ids, content, strict=True):  # find the one that is to blame
        if entry.token_id != token_id:
            raise RolloutError("length_mismatch", f"log-prob of token {entry.token_id} where {token_id} was sampled")
        value = entry.logprob
        # The comparisons are false for NaN.
        if value is None or not LOWEST_LOGPROB < value <= 1e-3:
            raise RolloutError("bad_logprob", f"log-prob {value} of token {token_id}")
    raise RolloutError("bad_logprob", "a log-prob is not a number")


def _all_usable(logprobs: list[float | None]) -> TypeGuard[list[float]]:
    """Return whether all are finite log-probs, in a few passes of C code rather than one of Python."""
    if None in logprobs:
        return False
    values = cast(list[float], logprobs)
    # A sum with NaN or an infinity in it is not finite either.
    return math.isfinite(sum(values)) and min(values) > LOWEST_LOGPROB and max(values) <= 1e-3


def _checked_spans(choice: WireChoice, unlabelled_version: int | None) -> list[VersionSpan]:
    length = len(choice.token_ids or [])
    if not choice.weight_versions:
        raise RolloutError("unversioned", "the server named no weight version")
    spans = []
    expected_start = 0
    for span in choice.weight_versions:
        label = span.version
        if label == _UNLABELLED and unlabelled_version is not None:
            label = str(unlabelled_version)
        if not (label.isascii() and label.isdecimal()):
            raise RolloutError("unversioned", f"weight version {span.version!r} is not a policy version")
        if span.start != expected_start or span.end <= span.start:
            raise RolloutError("bad_version_spans", f"span [{span.start}, {span.end}) after {expected_start}")
        expected_start = span.end
        spans.append(VersionSpan(int(label), span.start, span.end))
    if expected_start != length:
        raise RolloutError("bad_version_spans", f"spans cover {expected_start} of {length} tokens")
    return spans
