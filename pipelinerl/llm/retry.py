"""One table for failed requests: try again, fail the rollout, or end the run. Pure; waits for nothing.

Called by the client for every request that did not come back with status 200.
"""

from __future__ import annotations

import enum
import errno
import socket

from pipelinerl.errors import PipelineRLError


class Verdict(enum.Enum):
    """What to do about a failed request."""

    RETRY = "retry"
    FAIL_ROLLOUT = "fail_rollout"
    END_RUN = "end_run"


class Fault(enum.Enum):
    """Ways for a request to fail without an HTTP status."""

    #: The server's machine answers that nobody listens there, or does not answer: the server may be starting again.
    REFUSED = "refused"
    #: No connection could be tried: the name does not resolve, or this process may open no more of them.
    CANNOT_CONNECT = "cannot_connect"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    EMPTY = "empty"


class EndRunError(PipelineRLError):
    """A server's answer shows that no rollout can ever succeed (wrong token, unknown model or route)."""


# A status that is not here: other 5xx are tried again, anything else fails the rollout.
STATUS_TABLE: dict[int, Verdict] = {
    400: Verdict.FAIL_ROLLOUT,  # this request cannot be served, the next one may
    401: Verdict.END_RUN,  # the token is wrong: every request will be refused
    403: Verdict.END_RUN,
    404: Verdict.END_RUN,  # unknown model or route
    405: Verdict.END_RUN,
    408: Verdict.RETRY,
    409: Verdict.RETRY,
    413: Verdict.FAIL_ROLLOUT,
    422: Verdict.FAIL_ROLLOUT,
    425: Verdict.RETRY,
    429: Verdict.RETRY,  # too busy now
    500: Verdict.RETRY,
    502: Verdict.RETRY,
    503: Verdict.RETRY,
    504: Verdict.RETRY,
}

FAULT_TABLE: dict[Fault, Verdict] = {
    Fault.REFUSED: Verdict.RETRY,
    Fault.CANNOT_CONNECT: Verdict.RETRY,  # a name server may be away, and descriptors are given back
    Fault.DISCONNECTED: Verdict.RETRY,
    Fault.TIMEOUT: Verdict.RETRY,
    Fault.ABORTED: Verdict.RETRY,  # an aborted completion has not ended: never a training row
    Fault.EMPTY: Verdict.RETRY,
}

# Errors of `connect` and `socket` that this machine makes by itself (connect(2), socket(2)).
_OWN_ERRORS = frozenset(
    {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT}
)
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 10.0


def classify(problem: int | Fault) -> Verdict:
    """Return the verdict on an HTTP status or a fault without one."""
    if isinstance(problem, Fault):
        return FAULT_TABLE[problem]
    if problem in STATUS_TABLE:
        return STATUS_TABLE[problem]
    return Verdict.RETRY if problem >= 500 else Verdict.FAIL_ROLLOUT


def reason_of(problem: int | Fault) -> str:
    """Return the short word that is counted for this problem, for instance `http_500` or `timeout`."""
    return problem.value if isinstance(problem, Fault) else f"http_{problem}"


def connect_fault(error: OSError) -> tuple[Fault, str]:
    """What it means that a connection could not be made, and the cause in words.

    Several addresses of a name that failed in several ways come as one error without a number: the machine was asked.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, socket.gaierror):
        return Fault.CANNOT_CONNECT, f"the host's name cannot be resolved: {text}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Fault.CANNOT_CONNECT, f"{text} (raise the limit of open files, `ulimit -n`, where the run is launched)"
    return (Fault.CANNOT_CONNECT if error.errno in _OWN_ERRORS else Fault.REFUSED), text


def retry_delay_s(attempt: int, jitter: float, retry_after_s: float | None = None) -> float:
    """Seconds to wait before retry number `attempt` (from 0): 0.25, 0.5, 1 ... at most 10, each times 0.5 to 1.

    Args:
        attempt: retries already made.
        jitter: number in [0, 1) that spreads callers which failed together.
        retry_after_s: the server's own wish, honoured up to the cap.
    """
    delay_s: float = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**attempt) * (0.5 + 0.5 * jitter)
    if retry_after_s is not None:
        delay_s = max(delay_s, min(retry_after_s, _LONGEST_DELAY_S))
    return delay_s
