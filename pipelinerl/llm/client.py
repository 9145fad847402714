"""HTTP requests to the run's own servers: one table for failed ones, and the check of completions.

A failed request is retried, fails its rollout or ends the run. A completion, packed or JSON, that passes the check can
be trained on; any other has a reason.
"""

from __future__ import annotations

import enum
import errno
import socket
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import aiohttp
import msgspec

from pipelinerl.errors import RolloutError
from pipelinerl.records import VersionSpan
from pipelinerl.records.completion import (
    PackedSpan,
    decode_completion,
    is_packed,
    parse_weight_label,
    unpack_ids,
    unpack_logprobs,
)


class Verdict(enum.Enum):
    """What to do about a failed request."""

    RETRY = "retry"
    FAIL_ROLLOUT = "fail_rollout"
    END_RUN = "end_run"


class Fault(enum.Enum):
    """Ways for a request to fail without an HTTP error status."""

    #: Nobody listens at the address, or the machine does not answer: the server may be restarting.
    REFUSED = "refused"
    #: No connection was attempted: the name does not resolve, or this process is out of descriptors or ports.
    CANNOT_CONNECT = "cannot_connect"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    EMPTY = "empty"


VERDICTS: dict[int | Fault, Verdict] = {
    400: Verdict.FAIL_ROLLOUT,  # this request cannot be served, the next one may
    401: Verdict.END_RUN,  # wrong token: every request will be refused
    403: Verdict.END_RUN,
    404: Verdict.END_RUN,  # unknown model or route
    405: Verdict.END_RUN,
    408: Verdict.RETRY,
    409: Verdict.RETRY,
    413: Verdict.FAIL_ROLLOUT,
    422: Verdict.FAIL_ROLLOUT,
    425: Verdict.RETRY,
    429: Verdict.RETRY,
    500: Verdict.RETRY,
    502: Verdict.RETRY,
    503: Verdict.RETRY,
    504: Verdict.RETRY,
    Fault.REFUSED: Verdict.RETRY,
    Fault.CANNOT_CONNECT: Verdict.RETRY,  # a name server may be down, and descriptors are returned
    Fault.DISCONNECTED: Verdict.RETRY,
    Fault.TIMEOUT: Verdict.RETRY,
    Fault.ABORTED: Verdict.RETRY,  # an aborted completion has not ended: never a training row
    Fault.EMPTY: Verdict.RETRY,
}

# Errors of connect(2) and socket(2) that this machine raises without asking the other one.
_LOCAL_ERRORS = frozenset(
    {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT}
)
# Below vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE (5 s), so that a kept connection is never used while the server closes it.
_KEEP_ALIVE_S = 4.0
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 10.0

# In JSON the server writes NaN and -inf as -9999.0.
LOWEST_LOGPROB = -9998.0
# Rounding can push the log-prob of a certain token slightly above 0.
_HIGHEST_LOGPROB = 1e-3
_FINISHED = {"stop": True, "length": False, "repetition": False}
# vLLM's label for weights that were never updated.
_UNLABELLED = "default"


class Reply(NamedTuple):
    """Answer to one POST. `problem` is None for status 200, else the status or fault, with its text in `content`."""

    problem: int | Fault | None
    content: bytes
    retry_after_s: float | None = None


def classify(problem: int | Fault) -> Verdict:
    """Return the verdict on an HTTP status or a fault. Unlisted 5xx are retried, other statuses fail the rollout."""
    if problem in VERDICTS:
        return VERDICTS[problem]
    return Verdict.RETRY if isinstance(problem, int) and problem >= 500 else Verdict.FAIL_ROLLOUT


def reason_of(problem: int | Fault) -> str:
    """Return the word under which this problem is counted, for instance `http_500` or `timeout`."""
    return problem.value if isinstance(problem, Fault) else f"http_{problem}"


def connect_fault(error: OSError) -> tuple[Fault, str]:
    """Return what a failed connection attempt means, and its cause in words."""
    text = str(error) or type(error).__name__
    if isinstance(error, socket.gaierror):
        return Fault.CANNOT_CONNECT, f"cannot resolve the host name: {text}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Fault.CANNOT_CONNECT, f"{text} (raise the limit of open files, `ulimit -n`, where the run is launched)"
    # Several addresses that failed in different ways come as one error without errno: the other machine was asked.
    return (Fault.CANNOT_CONNECT if error.errno in _LOCAL_ERRORS else Fault.REFUSED), text


def retry_delay_s(attempt: int, jitter: float, retry_after_s: float | None = None) -> float:
    """Return seconds to wait before retry number `attempt` (from 0): 0.25, 0.5, 1 ... 10, each scaled by 0.5 to 1.

    Args:
        attempt: retries already made.
        jitter: number in [0, 1) that spreads callers that failed together.
        retry_after_s: the server's `Retry-After`, honored up to 10 s.
    """
    delay_s: float = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt) * (0.5 + 0.5 * jitter)
    if retry_after_s is not None:
        delay_s = max(delay_s, min(retry_after_s, _MAX_DELAY_S))
    return delay_s


def open_session() -> aiohttp.ClientSession:
    """Return a session for internal servers: connections are kept and unlimited, and proxies of the environment unused.

    The scheduler limits what is in flight; a second limit here would hide queueing from it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, ttl_dns_cache=300, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, *, timeout_s: float, token: str = "", accept: str = "*/*"
) -> Reply:
    """Send one JSON request and read the whole answer. Does not raise for what goes wrong on the way.

    Args:
        session: from `open_session`.
        url: where to.
        body: JSON.
        timeout_s: for all of it, connecting included.
        token: sent as bearer token if not empty.
        accept: media types that the caller reads.
    """
    headers = {"Content-Type": "application/json", "Accept": accept}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        # A redirect would carry prompts and token elsewhere; our servers send none.
        async with session.post(
            url, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        ) as response:
            content = await response.read()
            if response.status == 200:
                return Reply(None, content)
            return Reply(response.status, content, _seconds(response.headers.get("Retry-After")))
    except TimeoutError:
        return Reply(Fault.TIMEOUT, f"no answer within {timeout_s:g} s".encode())
    except aiohttp.ClientConnectorError as error:
        fault, text = connect_fault(error.os_error)
        return Reply(fault, text.encode())
    except (aiohttp.ClientError, ConnectionError) as error:
        return Reply(Fault.DISCONNECTED, (str(error) or type(error).__name__).encode())


def _seconds(value: str | None) -> float | None:
    """Read a `Retry-After` in seconds; its other form, a date, is ignored."""
    return float(value) if value is not None and value.strip().isdigit() else None


class WireLogprob(msgspec.Struct, gc=False):  # one per token: keep them off the garbage collector
    token_id: int
    logprob: float | None = None


class WireLogprobs(msgspec.Struct):
    content: list[WireLogprob] | None = None


class WireChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[PackedSpan] | None = None


class WireResponse(msgspec.Struct):
    choices: list[WireChoice]


class Completion(msgspec.Struct, frozen=True):
    """One checked completion. `logprobs` (if collected) and `version_spans` cover `token_ids` exactly."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_string: str | None
    version_spans: list[VersionSpan]


class _Answer(NamedTuple):
    """An unchecked choice in either form. `logprob_ids` are the tokens that the log-probs claim to belong to."""

    token_ids: list[int]
    logprobs: list[float] | list[float | None] | None
    logprob_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[PackedSpan] | None


_decode_json = msgspec.json.Decoder(WireResponse).decode


def is_finished(finish_reason: str) -> bool:
    """Return whether the model ended the sequence itself (end token or stop string) rather than running out of room."""
    return _FINISHED.get(finish_reason, False)


def read_completion(
    content: bytes, collect_logprobs: bool = True, unlabelled_version: int | None = None
) -> Completion | Fault:
    """Return the completion in `content`, or the fault (aborted, empty) for which the request is retried.

    Args:
        content: body of the answer.
        collect_logprobs: whether log-probs were requested.
        unlabelled_version: version of tokens from a server that was never given one; None rejects them.

    Raises:
        RolloutError: `bad_response`, `bad_finish_reason`, `length_mismatch`, `missing_logprobs`, `bad_logprob`,
            `unversioned` or `bad_version_spans`. Nothing is shortened or filled in.
    """
    try:
        answer = _read_packed(content) if is_packed(content) else _read_json(content)
    except ValueError as error:
        raise RolloutError("bad_response", str(error)) from error
    if answer.finish_reason in (None, "abort", "error"):
        return Fault.ABORTED
    if answer.finish_reason not in _FINISHED:
        raise RolloutError("bad_finish_reason", str(answer.finish_reason))
    if not answer.token_ids:
        return Fault.EMPTY
    logprobs = _checked_logprobs(answer) if collect_logprobs else []
    spans = _labelled_spans(answer.weight_versions or [], unlabelled_version)
    check_spans(spans, len(answer.token_ids))
    stop_string = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    return Completion(answer.token_ids, logprobs, answer.finish_reason, stop_string, spans)


def check_spans(spans: list[VersionSpan], length: int) -> None:
    """Check that `spans` cover `length` tokens without gaps.

    Raises:
        RolloutError: `unversioned` without any span, else `bad_version_spans`.
    """
    if not spans:
        raise RolloutError("unversioned", f"no version spans for {length} tokens")
    expected_start = 0
    for span in spans:
        if span.start != expected_start or span.end <= span.start:
            raise RolloutError("bad_version_spans", f"span [{span.start}, {span.end}) after {expected_start} tokens")
        expected_start = span.end
    if expected_start != length:
        raise RolloutError("bad_version_spans", f"spans cover {expected_start} of {length} tokens")


def _read_packed(content: bytes) -> _Answer:
    packed = decode_completion(content)
    ids = unpack_ids(packed.token_ids)
    logprobs = None if packed.logprobs is None else unpack_logprobs(packed.logprobs)
    # The server packs the log-probs of exactly these ids.
    return _Answer(ids, logprobs, ids, packed.finish_reason, packed.stop_reason, packed.weight_versions)


def _read_json(content: bytes) -> _Answer:
    choices = _decode_json(content).choices  # its errors are ValueErrors, also for invalid UTF-8
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices, expected 1")
    choice = choices[0]
    entries = choice.logprobs.content if choice.logprobs is not None else None
    return _Answer(
        choice.token_ids or [],
        None if entries is None else [entry.logprob for entry in entries],
        [entry.token_id for entry in entries or []],
        choice.finish_reason,
        choice.stop_reason,
        choice.weight_versions,
    )


def are_logprobs(values: Sequence[float]) -> bool:
    """False if a value is not finite, positive beyond rounding, or the server's stand-in for NaN."""
    # Passes in C: a NaN or an infinity makes the sum one too.
    if not len(values):
        return True
    return isfinite(sum(values)) and min(values) > LOWEST_LOGPROB and max(values) <= _HIGHEST_LOGPROB


def _checked_logprobs(answer: _Answer) -> list[float]:
    ids = answer.token_ids
    if answer.logprobs is None:
        raise RolloutError("missing_logprobs", f"no log-probs for {len(ids)} tokens")
    if len(answer.logprobs) != len(ids):
        raise RolloutError("length_mismatch", f"{len(answer.logprobs)} log-probs for {len(ids)} tokens")
    checked = []
    for token_id, logprob_id, value in zip(ids, answer.logprob_ids, answer.logprobs, strict=True):
        if logprob_id != token_id:
            raise RolloutError("length_mismatch", f"log-prob of token {logprob_id}, but token {token_id} was sampled")
        # The comparisons are false for NaN.
        if value is None or not LOWEST_LOGPROB < value <= _HIGHEST_LOGPROB:
            raise RolloutError("bad_logprob", f"log-prob {value} of token {token_id}")
        checked.append(value)
    return checked


def _labelled_spans(spans: list[PackedSpan], unlabelled_version: int | None) -> list[VersionSpan]:
    labelled = []
    for span in spans:
        label = span.version
        if label == _UNLABELLED and unlabelled_version is not None:
            label = str(unlabelled_version)
        try:
            policy, version = parse_weight_label(label)
        except ValueError as error:
            raise RolloutError("unversioned", str(error)) from error
        if policy:
            raise RolloutError("unversioned", f"tokens of policy {policy!r}, expected the run's only policy")
        labelled.append(VersionSpan(version, span.start, span.end))
    return labelled
