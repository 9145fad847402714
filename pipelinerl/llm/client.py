"""Token ids in, token ids out: one completion from a server, checked and retried.

Called by `llm_async_generate` (and by the log-prob probe of evaluation tools); waits for the server, at most
`request_timeout_s` per attempt and `max_retries` + 1 attempts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from pipelinerl.errors import RetryableRolloutError, RolloutError
from pipelinerl.llm.answers import Completion, read_completion
from pipelinerl.llm.connections import BrokenResponseError, Connections
from pipelinerl.llm.retry import EndRunError, Fault, Verdict, classify, connect_fault, reason_of, retry_delay_s
from pipelinerl.llm.trainable import TrainableLLM
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE

_QUOTED_CHARACTERS = 300
# Our servers answer with arrays of numbers then; any other takes no notice and answers with JSON.
_ACCEPT = f"{MEDIA_TYPE}, application/json"
_ACCEPT_LINE = f"Accept: {_ACCEPT}\r\n".encode()


_encode_request = msgspec.json.Encoder().encode


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
                llm.counters.versions.update(span.version for span in completion.version_spans)
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
    headers = {"Content-Type": "application/json", "Accept": _ACCEPT}
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
        fault, text = connect_fault(error.os_error)
        return fault, text.encode(), None
    except (aiohttp.ClientError, ConnectionError) as error:
        return Fault.DISCONNECTED, (str(error) or type(error).__name__).encode(), None


async def _post_plainly(
    llm: TrainableLLM, connections: Connections, url: str, body: bytes
) -> tuple[int | Fault | None, bytes, float | None]:
    """The same over the worker's own connections."""
    headers = _ACCEPT_LINE
    if llm.token:
        headers += b"Authorization: Bearer %b\r\n" % llm.token.encode()
    try:
        response = await connections.post(url, body, headers, llm.request_timeout_s)
    except TimeoutError:
        return Fault.TIMEOUT, b"no answer in time", None
    except BrokenResponseError as error:
        return Fault.DISCONNECTED, str(error).encode(), None
    except OSError as error:
        fault, text = connect_fault(error)
        return fault, text.encode(), None
    if response.status == 200:
        return None, response.body, None
    return response.status, response.body, _seconds(response.retry_after)


def _seconds(value: str | None) -> float | None:
    """Read a `Retry-After` in seconds; its other form, a date, is ignored."""
    return float(value) if value is not None and value.strip().isdigit() else None
