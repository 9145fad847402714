"""How a rollout gets its answer graded: by a verifier service over HTTP, or by grader processes of its own worker.

The rollout worker opens one of the two; `pipelinerl.grading.verify` finds it through the context of the running task.
Waits for the grade; deadlines are the graders'.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Protocol

import aiohttp
import msgspec

from pipelinerl.config.sections import VerifierConfig
from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError
from pipelinerl.sandbox.grader_pool import GraderPool
from pipelinerl.sandbox.messages import Grade, GradeAnswer, GradeFailed, GradeRequest, clean_text

VERIFY_PATH = "/verify"
_ATTEMPTS = 4
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 4.0
# A service that died is started again in place.
RETURN_TIMEOUT_S = 120.0
_QUOTED_BYTES = 300
_decode = msgspec.json.Decoder(Grade | GradeFailed).decode
_encode = msgspec.json.Encoder().encode


class Verifier(Protocol):
    """Whatever grades answers."""

    async def grade(self, request: GradeRequest) -> GradeAnswer: ...


# A rollout is called with four arguments, none of which can carry this; tasks inherit it from their worker.
_current: ContextVar[Verifier] = ContextVar("pipelinerl_verifier")


def current_verifier() -> Verifier:
    """Return the verifier of the running rollout.

    Raises:
        DomainError: there is none here.
    """
    try:
        return _current.get()
    except LookupError:
        raise DomainError(
            "verify() was called outside of a rollout. In a script or a test, write "
            "`async with open_verifier(VerifierConfig(), []): ...` (from pipelinerl.grading) around it."
        ) from None


@contextlib.asynccontextmanager
async def open_verifier(
    config: VerifierConfig, urls: Sequence[str], token: str = "", return_timeout_s: float = RETURN_TIMEOUT_S
) -> AsyncIterator[Verifier]:
    """Make a verifier current for this task and the tasks that it starts.

    Args:
        config: number of grader processes and their limits.
        urls: verifier services; none: grader processes of this process, started at the first use.
        token: secret of the services.
        return_timeout_s: how long a service may be away while it is started again.
    """
    async with _open(config, urls, token, return_timeout_s) as verifier:
        previous = _current.set(verifier)
        try:
            yield verifier
        finally:
            _current.reset(previous)


@contextlib.asynccontextmanager
async def _open(
    config: VerifierConfig, urls: Sequence[str], token: str, return_timeout_s: float
) -> AsyncIterator[Verifier]:
    if not urls:
        async with local_pool(config) as pool:
            yield pool
        return
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), trust_env=False
    ) as session:
        yield RemoteVerifier(urls, token, session, config.queue_timeout_s, return_timeout_s)


def local_pool(config: VerifierConfig) -> GraderPool:
    """Return the pool that `config` describes."""
    return GraderPool(config.processes, config.timeout_s, config.memory_mib << 20)


class RemoteVerifier:
    """Asks verifier services, the least busy one first.

    Args:
        queue_timeout_s: longest wait for one answer, queueing included.
        return_timeout_s: how long no service may be reached before the rollout hears of it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        session: aiohttp.ClientSession,
        queue_timeout_s: float,
        return_timeout_s: float = RETURN_TIMEOUT_S,
    ) -> None:
        self._return_timeout_s = return_timeout_s
        self._pending = {url.rstrip("/"): 0 for url in urls}
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=queue_timeout_s)

    async def grade(self, request: GradeRequest) -> GradeAnswer:
        """Return the service's answer; passing troubles (busy, refused, 5xx) are tried again on another service, and a
        service that is being started again is waited for.

        Raises:
            RetryableRolloutError: no service answered.
            RolloutError: a service refused the request.
        """
        body = _encode(msgspec.structs.replace(request, text=clean_text(request.text)))
        trouble, avoid, attempt = "", "", 0
        give_up_at = time.monotonic() + self._return_timeout_s
        while True:
            url = min(self._pending, key=lambda each: (each == avoid, self._pending[each]))
            self._pending[url] += 1
            is_away = False
            try:
                answer = await self._post(url, body)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                answer = f"{type(error).__name__}: {error}"
                is_away = not isinstance(error, TimeoutError)
            finally:
                self._pending[url] -= 1
            if not isinstance(answer, str):
                return answer
            trouble, avoid, attempt = f"{url}: {answer}", url, attempt + 1
            if attempt >= _ATTEMPTS and not (is_away and time.monotonic() < give_up_at):
                raise RetryableRolloutError("verifier_unreachable", f"{trouble} ({attempt} attempts)")
            await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** (attempt - 1), _LONGEST_DELAY_S))

    async def _post(self, url: str, body: bytes) -> GradeAnswer | str:
        """Return the answer, or what went wrong in passing."""
        async with self._session.post(
            url + VERIFY_PATH, data=body, headers=self._headers, timeout=self._timeout
        ) as response:
            content = await response.read()
            if response.status == 429 or response.status >= 500:
                return f"status {response.status}"
            if response.status != 200:
                text = content[:_QUOTED_BYTES].decode(errors="replace")
                raise RolloutError("verifier_refused", f"{url}: status {response.status}: {text}")
        try:
            return _decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"not a grade: {error}"
