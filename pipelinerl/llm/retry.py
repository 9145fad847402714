"""One table for failed requests: try again, fail the rollout, or end the run. Pure; waits for nothing.

Called by the client for every request that did not come back with status 200.
"""

from __future__ import annotations

import enum

from pipelinerl.errors import PipelineRLError


class Verdict(enum.Enum):
    """What to do about a failed request."""

    RETRY = "retry"
    FAIL_ROLLOUT = "fail_rollout"
    END_RUN = "end_run"


class Fault(enum.Enum):
    """Ways for a request to fail without an HTTP status."""

    REFUSED = "refused"
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
    Fault.DISCONNECTED: Verdict.RETRY,
    Fault.TIMEOUT: Verdict.RETRY,
    Fault.ABORTED: Verdict.RETRY,  # an aborted completion has not ended: never a training row
    Fault.EMPTY: Verdict.RETRY,
}

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
