"""HTTP requests to the run's own servers. One table says whether a failed one is retried or what it ends."""

from __future__ import annotations

import enum
import errno
import socket
from typing import NamedTuple

import aiohttp


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
