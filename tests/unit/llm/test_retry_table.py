"""R3: one table says what a failed request means."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from pipelinerl.llm.client import Fault, Verdict, classify, connect_fault, reason_of, retry_delay_s


@pytest.mark.parametrize(
    ("problem", "verdict"),
    [
        (400, Verdict.FAIL_ROLLOUT),
        (401, Verdict.END_RUN),
        (403, Verdict.END_RUN),
        (404, Verdict.END_RUN),
        (413, Verdict.FAIL_ROLLOUT),
        (418, Verdict.FAIL_ROLLOUT),
        (422, Verdict.FAIL_ROLLOUT),
        (429, Verdict.RETRY),
        (500, Verdict.RETRY),
        (503, Verdict.RETRY),
        (507, Verdict.RETRY),
        (Fault.REFUSED, Verdict.RETRY),
        (Fault.CANNOT_CONNECT, Verdict.RETRY),
        (Fault.DISCONNECTED, Verdict.RETRY),
        (Fault.TIMEOUT, Verdict.RETRY),
        (Fault.ABORTED, Verdict.RETRY),
        (Fault.EMPTY, Verdict.RETRY),
    ],
)
def test_r3_every_problem_has_one_verdict(problem: int | Fault, verdict: Verdict) -> None:
    assert classify(problem) is verdict


@pytest.mark.parametrize(
    ("error", "fault", "text"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), Fault.REFUSED, "Connect call failed"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), Fault.REFUSED, "No route to host"),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 101] b"), Fault.REFUSED, "[Errno 101] b"),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), Fault.CANNOT_CONNECT, "no such name"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), Fault.CANNOT_CONNECT, "Too many open files"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), Fault.CANNOT_CONNECT, "`ulimit -n`"),
        (OSError(errno.EADDRNOTAVAIL, "no port is left"), Fault.CANNOT_CONNECT, "no port is left"),
        (ConnectionResetError(), Fault.REFUSED, "ConnectionResetError"),
    ],
)
def test_only_what_the_other_side_says_is_a_refusal(error: OSError, fault: Fault, text: str) -> None:
    found, said = connect_fault(error)
    assert found is fault and text in said


def test_reasons_are_words() -> None:
    assert (reason_of(503), reason_of(Fault.TIMEOUT)) == ("http_503", "timeout")


def test_delays_double_up_to_a_cap_and_honour_the_server() -> None:
    assert [retry_delay_s(attempt, jitter=0.0) for attempt in (0, 1, 2)] == [0.125, 0.25, 0.5]
    assert retry_delay_s(0, jitter=0.5) == 0.1875
    assert retry_delay_s(20, jitter=0.0) == 5.0
    assert retry_delay_s(0, jitter=0.0, retry_after_s=3) == 3
    assert retry_delay_s(0, jitter=0.0, retry_after_s=900) == 10
