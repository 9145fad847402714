"""The verifier service over HTTP: token, limits, and a client that goes on when a service is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.graders import exact, needs_a_service, sleeps
from fakes.served_app import served

import pipelinerl.sandbox.services as client_module
from pipelinerl.config.task import VerifierConfig
from pipelinerl.errors import RetryableRolloutError, RolloutError
from pipelinerl.grading import Grade, open_verifier, verify
from pipelinerl.sandbox.main import with_health
from pipelinerl.sandbox.protocol import Failed, GradeRequest
from pipelinerl.sandbox.service import verifier_app
from pipelinerl.sandbox.services import RemoteVerifier, Services, local_pool

TESTS = Path(__file__).parents[2]
TOKEN = "verifier-test-token-0123456789"
# Of gradings that come to an end; nobody waits so long.
LIMIT_S = 60.0


def service(max_queue: int = 100) -> contextlib.AbstractAsyncContextManager[str]:
    pool = local_pool(VerifierConfig(processes=1, timeout_s=LIMIT_S))
    return served(with_health(verifier_app(pool, max_queue)), TOKEN)


@pytest.fixture(autouse=True)
def _graders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


async def test_grades_and_failures_come_through() -> None:
    async with service() as url, open_verifier(VerifierConfig(), [url], TOKEN):
        assert await verify(exact, "4", {"answer": "4"}) == Grade(1.0, "correct")
        with pytest.raises(RolloutError) as caught:
            await verify(sleeps, "", {}, timeout_s=0.3)
        assert caught.value.reason == "grader_timeout"
        assert await verify(exact, "3", {"answer": "4"}) == Grade(0.0, "wrong")


async def test_only_health_is_open() -> None:
    async with service() as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        for path in ("/ask", "/docs", "/openapi.json"):
            async with session.post(f"{url}{path}") as response:
                assert response.status == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.post(f"{url}/ask", data=b"{torn", headers=headers) as response:
            assert response.status == 400


async def test_health_answers_while_a_grader_spins() -> None:
    async with service() as url, open_verifier(VerifierConfig(), [url], TOKEN) as verifier:
        blocks = "fakes.graders.blocks_in_c"
        grading = asyncio.create_task(verifier.grade(GradeRequest(blocks, "", {}, timeout_s=3000.0)))
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.get(f"{url}/health") as response:
                    assert response.status == 200 and not grading.done()
        grading.cancel()
    async with service() as url, open_verifier(VerifierConfig(), [url], TOKEN) as verifier:
        answer = await verifier.grade(GradeRequest("fakes.graders.sleeps", "", {}, timeout_s=1.0))
        assert isinstance(answer, Failed) and answer.reason == "grader_timeout"


async def test_a_full_service_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_DELAY_S", 0.0)
    async with service(max_queue=0) as url, open_verifier(VerifierConfig(), [url], TOKEN):
        with pytest.raises(RetryableRolloutError, match="verifier_busy") as caught:
            await verify(exact, "4", {"answer": "4"})
        assert caught.value.reason == "verifier_unreachable"


async def test_a_wrong_token_fails_the_rollout() -> None:
    async with service() as url, open_verifier(VerifierConfig(), [url], "wrong"):
        with pytest.raises(RolloutError, match="401"):
            await verify(exact, "4", {"answer": "4"})


async def test_a_reason_that_may_pass_comes_through_the_service() -> None:
    async with service() as url, open_verifier(VerifierConfig(), [url], TOKEN):
        with pytest.raises(RetryableRolloutError, match=r"^service_away: it does not answer$"):
            await verify(needs_a_service, "", {})


async def test_a_busy_or_absent_service_is_tried_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with service() as url, open_verifier(VerifierConfig(), [dead, url], TOKEN):
            assert (await verify(exact, "4", {"answer": "4"})).score == 1.0
        monkeypatch.setattr("pipelinerl.sandbox.services.RETURN_TIMEOUT_S", 0.0)
        async with open_verifier(VerifierConfig(), [dead], TOKEN):
            with pytest.raises(RetryableRolloutError, match="verifier_unreachable"):
                await verify(exact, "4", {"answer": "4"})


async def test_a_restarting_service_is_waited_for_and_a_busy_one_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LONGEST_DELAY_S", 0.0)
    right = Grade(1.0, "correct")
    answers: list[Any] = []

    class Scripted(Services):
        async def send(self, url: str, request: Any) -> Any:
            answer = answers.pop(0)
            if answer is right:
                return answer
            raise RetryableRolloutError("verifier_unreachable", "away") from answer

    verifier = RemoteVerifier(Scripted("verifier", ["http://x"], TOKEN, None, 60.0))
    request = GradeRequest("fakes.graders.exact", "", {})
    answers += [ConnectionRefusedError("away")] * 9 + [right]
    assert await verifier.grade(request) == right and answers == []
    answers += [None] * 5  # status 503 has no cause
    with pytest.raises(RetryableRolloutError) as caught:
        await verifier.grade(request)
    assert caught.value.reason == "verifier_unreachable" and answers == []
