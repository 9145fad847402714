"""R1 and R2: whatever a grader does, its caller gets an answer in time, and others are not held up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.loop_lag import measured_lag

from pipelinerl.config.task import VerifierConfig
from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError
from pipelinerl.grading import Grade, open_verifier, verify
from pipelinerl.sandbox.pool import GraderPool
from pipelinerl.sandbox.protocol import Failed, GradeAnswer, GradeRequest, as_grade, error_of

TESTS = Path(__file__).parents[2]
MEMORY = 1 << 30
# Of graders that end by themselves; nobody waits so long.
LIMIT_S = 60.0
# Of graders that never end.
SHORT_S = 1.0


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GraderPool]:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    async with GraderPool(size=1, timeout_s=LIMIT_S, memory_bytes=MEMORY) as made:
        yield made
    assert made.num_processes == 0


async def grade(pool: GraderPool, name: str, text: str = "", timeout_s: float | None = None) -> GradeAnswer:
    return await pool.grade(GradeRequest(f"fakes.graders.{name}", text, {"answer": "4"}, timeout_s=timeout_s))


async def test_a_right_answer_and_a_wrong_one(pool: GraderPool) -> None:
    assert await grade(pool, "exact", "4") == Grade(1.0, "correct")
    assert await grade(pool, "exact", "5") == Grade(0.0, "wrong")
    assert pool.num_processes == 1


async def test_r1_a_result_that_is_no_number_fails(pool: GraderPool) -> None:
    for kind in ("none", "nan", "empty", "text", "infinite"):
        answer = await grade(pool, "returns", kind)
        assert isinstance(answer, Failed) and answer.reason == "grader_bad_result", kind


async def test_r1_numbers_stay_what_they_are(pool: GraderPool) -> None:
    for kind, score in (("int", 1.0), ("zero", 0.0), ("true", 1.0)):
        answer = await grade(pool, "returns", kind)
        assert isinstance(answer, Grade) and answer.score == score, kind


async def test_r1_misbehaviour_is_a_failure_with_a_reason_and_the_slot_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in a pool of its own, at the same time: most of it is waiting for deadlines."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    reasons = {
        "raises": "grader_raised",
        "dies": "grader_died",
        "sleeps": "grader_timeout",
        "not_marked": "grader_missing",
        "absent": "grader_missing",
    }

    async def misbehave(name: str, reason: str) -> None:
        async with GraderPool(size=1, timeout_s=LIMIT_S, memory_bytes=MEMORY) as pool:
            await grade(pool, "exact", "4")
            started = time.monotonic()
            answer = await grade(pool, name, timeout_s=SHORT_S if reason == "grader_timeout" else None)
            assert isinstance(answer, Failed) and answer.reason == reason, (name, answer)
            assert time.monotonic() - started < 2 * LIMIT_S, name
            assert await grade(pool, "exact", "4") == Grade(1.0, "correct"), name
        assert pool.num_processes == 0, name

    await asyncio.gather(*(misbehave(name, reason) for name, reason in reasons.items()))


UNGRADED = Grade(0.0, "unparsable", {"over_limit": 1.0})


@pytest.mark.parametrize("name", ["spins", "swallows_everything", "blocks_in_c", "allocates"])
async def test_an_answer_that_takes_all_time_or_memory_scores_0(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    async with GraderPool(size=1, timeout_s=LIMIT_S, memory_bytes=MEMORY) as pool:
        # The deadline counts the time that the process works, so that other work of the machine decides nothing.
        monkeypatch.setattr("pipelinerl.sandbox.pool._PATIENCE", LIMIT_S)
        assert await grade(pool, name, timeout_s=None if name == "allocates" else SHORT_S) == UNGRADED
        assert pool.num_processes == 0
        assert await grade(pool, "exact", "4") == Grade(1.0, "correct")


async def test_time_that_a_grader_waits_is_not_its_own(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.sandbox.pool._PATIENCE", LIMIT_S)
    assert await grade(pool, "waits_a_moment", timeout_s=SHORT_S) == Grade(1.0, "correct")


async def test_a_reason_that_may_pass_keeps_the_process_and_is_raised_as_such(pool: GraderPool) -> None:
    answer = await grade(pool, "needs_a_service")
    assert answer == Failed("service_away", "it does not answer", transient=True)
    (process,) = pool._children
    assert await grade(pool, "exact", "4") == Grade(1.0, "correct")
    assert pool._children == [process]
    with pytest.raises(RetryableRolloutError, match="service_away: it does not answer"):
        raise error_of(answer)


async def test_r1_threads_work(pool: GraderPool) -> None:
    assert await grade(pool, "uses_a_thread") == Grade(1.0, "correct")


def wait_until_gone(pid: int) -> None:
    """A killed process takes a moment to go."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_what_a_grader_started_is_killed_with_it(pool: GraderPool, tmp_path: Path) -> None:
    file, timeout_s = tmp_path / "pid", SHORT_S
    while not (file.exists() and file.read_text()):
        # On a busy machine it may be killed before it has started anything: then it is given more time.
        assert timeout_s <= LIMIT_S
        answer = await grade(pool, "forks_and_hangs", str(file), timeout_s=timeout_s)
        assert isinstance(answer, Failed) and answer.reason == "grader_timeout"
        timeout_s *= 4
    await asyncio.to_thread(wait_until_gone, int(file.read_text()))


async def test_a_confined_grader_can_only_compute(pool: GraderPool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    for way in ("run", "system", "connect", "write", "remove"):
        answer = await pool.grade(GradeRequest("fakes.graders.escapes", way, {"path": str(file)}))
        assert isinstance(answer, Failed) and "PermissionError" in answer.message, way
        assert file.read_text() == "here", way


async def test_secrets_stay_out_of_reach(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SERVER_TOKEN", "secret")
    assert await grade(pool, "shows_environment", "PATH") == Grade(1.0, "correct")
    assert await grade(pool, "shows_environment", "PIPELINERL_SERVER_TOKEN") == Grade(0.0, "wrong")


async def test_a_cancelled_rollout_gives_its_process_back(pool: GraderPool) -> None:
    await grade(pool, "exact", "4")
    task = asyncio.create_task(grade(pool, "spins"))
    while pool._idle:  # noqa: ASYNC110 - until the task has taken the process
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await grade(pool, "exact", "4") == Grade(1.0, "correct")


async def test_text_that_no_encoding_can_carry_is_graded(pool: GraderPool) -> None:
    assert await grade(pool, "exact", "\ud800 \x00 " + "x" * 1_000_000) == Grade(0.0, "wrong")


async def test_a_problem_that_cannot_be_sent_is_a_failure(pool: GraderPool) -> None:
    answer = await pool.grade(GradeRequest("fakes.graders.exact", "", {"answer": 1 << 70}))
    assert isinstance(answer, Failed) and answer.reason == "grader_bad_request"


async def test_a_process_is_replaced_after_its_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.sandbox.pool.MAX_USES", 2)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    async with GraderPool(size=1, timeout_s=LIMIT_S, memory_bytes=MEMORY) as pool:
        pids = set()
        for _ in range(4):
            await grade(pool, "exact", "4")
            pids.update(child.process.pid for child in pool._children)
        assert len(pids) == 2


async def test_r2_a_hundred_others_finish_while_hostile_ones_meet_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    # The best of three: a machine that stands still for a moment must not decide.
    lags_s: list[float] = []
    while not lags_s or (lags_s[-1] >= 0.1 and len(lags_s) < 3):
        lags_s.append(await _lag_p99_s())
    assert lags_s[-1] < 0.1, f"the event loop stood still: p99 of three attempts {lags_s}"


async def _lag_p99_s() -> float:
    names = ("spins", "blocks_in_c", "allocates", "sleeps")
    async with GraderPool(size=3, timeout_s=LIMIT_S, memory_bytes=MEMORY) as pool, measured_lag() as lag:
        hostile = [asyncio.create_task(grade(pool, name, timeout_s=SHORT_S)) for name in names]
        others = [asyncio.create_task(grade(pool, "exact", "4")) for _ in range(100)]
        assert all(answer == Grade(1.0, "correct") for answer in await asyncio.gather(*others))
        assert all(answer == UNGRADED or isinstance(answer, Failed) for answer in await asyncio.gather(*hostile))
    return lag.p99_s


async def test_verify_finds_its_verifier_and_raises_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from fakes.graders import exact, not_marked, raises

    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with pytest.raises(DomainError, match="outside of a rollout"):
        await verify(exact, "4", {"answer": "4"})
    async with open_verifier(VerifierConfig(processes=1), []):
        grades = await asyncio.gather(*(asyncio.create_task(verify(exact, t, {"answer": "4"})) for t in ("4", "3")))
        assert [each.score for each in grades] == [1.0, 0.0]
        with pytest.raises(RolloutError, match="no grade for 'x'") as caught:
            await verify(raises, "x", {})
        assert caught.value.reason == "grader_raised"
        with pytest.raises(DomainError, match="@grader"):
            await verify(not_marked, "x", {})


@pytest.mark.parametrize(
    ("grade", "words"),
    [
        (Grade(1.0, "ok"), "status is 'ok', expected one of 'correct', 'wrong', 'no_answer', 'unparsable'"),
        (Grade("1", "correct"), "score is '1', expected a finite number"),
        (Grade(1.0, "correct", {"tests": None}), "details has 'tests': None"),
        (Grade(1.0, "correct", [1.0]), "details are a list"),
    ],
)
def test_a_grade_that_was_filled_wrongly_is_told_how(grade: Any, words: str) -> None:
    answer = as_grade(grade)
    assert isinstance(answer, Failed) and answer.reason == "grader_bad_result" and words in answer.message
