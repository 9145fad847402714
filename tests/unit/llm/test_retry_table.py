"""R3: one table says what a failed request means."""

from __future__ import annotations

import pytest

from pipelinerl.llm.retry import Fault, Verdict, classify, reason_of, retry_delay_s


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
        (Fault.DISCONNECTED, Verdict.RETRY),
        (Fault.TIMEOUT, Verdict.RETRY),
        (Fault.ABORTED, Verdict.RETRY),
        (Fault.EMPTY, Verdict.RETRY),
    ],
)
def test_r3_every_problem_has_one_verdict(problem: int | Fault, verdict: Verdict) -> None:
    assert classify(problem) is verdict


def test_reasons_are_words() -> None:
    assert (reason_of(503), reason_of(Fault.TIMEOUT)) == ("http_503", "timeout")


def test_delays_double_up_to_a_cap_and_honour_the_server() -> None:
    assert [retry_delay_s(attempt, jitter=0.0) for attempt in (0, 1, 2)] == [0.125, 0.25, 0.5]
    assert retry_delay_s(0, jitter=0.5) == 0.1875
    assert retry_delay_s(20, jitter=0.0) == 5.0
    assert retry_delay_s(0, jitter=0.0, retry_after_s=3) == 3
    assert retry_delay_s(0, jitter=0.0, retry_after_s=900) == 10
