"""How a rollout reaches the sandbox: graders and text games, in processes of its worker or behind HTTP services.

The rollout worker opens the services; tasks find them through context variables, because a rollout function is called
with four arguments that cannot carry them. A service that is being restarted is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from pipelinerl.config.task import VerifierConfig
from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError
from pipelinerl.llm.client import open_session
from pipelinerl.sandbox.pool import GraderPool
from pipelinerl.sandbox.protocol import (
    SERVICE_PATH,
    ActInGame,
    CloseGame,
    Failed,
    GameOpened,
    GameRequest,
    GameStep,
    Grade,
    GradeAnswer,
    GradeRequest,
    OpenGame,
    Reply,
    clean_text,
    error_of,
)

_ATTEMPTS = 5
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 4.0
#: How long a service may be away while it is restarted, before the rollout fails.
RETURN_TIMEOUT_S = 120.0
#: Longest waits for one answer, queueing included.
_GRADING_TIMEOUT_S, _GAME_TIMEOUT_S = 300.0, 600.0
_QUOTED_BYTES = 300
_decode = msgspec.json.Decoder(Reply).decode


class Services:
    """The services of one kind.

    Args:
        kind: `verifier` or `environment`; the first word of failure reasons.
        urls: their addresses; may be none.
        token: the run's secret.
        session: for requests to them.
        timeout_s: longest wait for one answer, queueing included.

    Attributes:
        load: requests, or games, of this worker at each service.
    """

    def __init__(
        self,
        kind: str,
        urls: Sequence[str],
        token: str,
        session: aiohttp.ClientSession | None,
        timeout_s: float,
    ) -> None:
        self._kind, self._session = kind, session
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.load = {url.rstrip("/"): 0 for url in urls}

    async def ask(self, request: GradeRequest | OpenGame) -> tuple[str, Reply]:
        """Ask the least busy service and return (its address, its reply); the address's load is 1 higher.

        Failures that may pass (busy, refused, 5xx) are retried on another service.

        Raises:
            RetryableRolloutError: no service answered.
            RolloutError: a service refused the request.
        """
        avoid = ""
        give_up_at = monotonic() + RETURN_TIMEOUT_S
        for attempt in itertools.count(1):
            url = min(self.load, key=lambda each: (each == avoid, self.load[each]))
            self.load[url] += 1
            is_taken = is_away = False
            try:
                reply = await self.send(url, request)
                is_taken = not (isinstance(reply, Failed) and reply.reason == f"{self._kind}_busy")
                if is_taken:
                    return url, reply
                trouble = f"{url}: {reply}"
            except RetryableRolloutError as error:
                trouble, cause = str(error), error.__cause__
                is_away = isinstance(cause, aiohttp.ClientError | ConnectionError)
                is_away = is_away and not isinstance(cause, TimeoutError)
            finally:
                self.load[url] -= not is_taken
            if attempt >= _ATTEMPTS and not (is_away and monotonic() < give_up_at):
                raise RetryableRolloutError(f"{self._kind}_unreachable", f"{trouble} ({attempt} attempts)")
            avoid = url
            await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** (attempt - 1), _LONGEST_DELAY_S))
        raise AssertionError("unreachable")

    async def send(self, url: str, request: GradeRequest | GameRequest) -> Reply:
        """Send one request and return the reply.

        Raises:
            RetryableRolloutError: the service does not answer, or not properly.
            RolloutError: it refuses the request, or that cannot be sent.
        """
        assert self._session is not None, "only services without urls have no session"
        try:
            body = msgspec.json.encode(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise RolloutError(f"{self._kind}_bad_request", f"the problem cannot be sent: {error}") from error
        unreachable = f"{self._kind}_unreachable"
        try:
            async with self._session.post(
                url + SERVICE_PATH, data=body, headers=self.headers, timeout=self._timeout
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise RetryableRolloutError(unreachable, f"{url}: {type(error).__name__}: {error}") from error
        text = content[:_QUOTED_BYTES].decode(errors="replace")
        if response.status == 429 or response.status >= 500:
            raise RetryableRolloutError(unreachable, f"{url}: status {response.status}: {text}")
        if response.status >= 300:
            raise RolloutError(f"{self._kind}_refused", f"{url}: status {response.status}: {text}")
        try:
            return _decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RetryableRolloutError(unreachable, f"{url}: not an answer of this service: {error}") from error


class RemoteVerifier:
    """Grades answers in verifier services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def grade(self, request: GradeRequest) -> GradeAnswer:
        """Return a service's grade. See `Services.ask` for what it raises."""
        url, reply = await self._services.ask(msgspec.structs.replace(request, text=clean_text(request.text)))
        self._services.load[url] -= 1
        if isinstance(reply, Grade | Failed):
            return reply
        raise RetryableRolloutError("verifier_unreachable", f"{url}: not a grade: {reply}")


Verifier = GraderPool | RemoteVerifier
_verifier: ContextVar[Verifier] = ContextVar("pipelinerl_verifier")


def current_verifier() -> Verifier:
    """Return the verifier of the running rollout.

    Raises:
        DomainError: there is none here.
    """
    try:
        return _verifier.get()
    except LookupError:
        raise DomainError(
            "verify() was called outside of a rollout. In a script or a test, write "
            "`async with open_verifier(VerifierConfig(), []): ...` (from pipelinerl.grading) around it."
        ) from None


def local_pool(config: VerifierConfig) -> GraderPool:
    """Return the pool of grader processes that `config` describes."""
    return GraderPool(config.processes, config.timeout_s, config.memory_mib << 20)


@contextlib.asynccontextmanager
async def open_verifier(config: VerifierConfig, urls: Sequence[str], token: str = "") -> AsyncIterator[Verifier]:
    """Make a verifier current for this task and the tasks that it starts.

    Args:
        config: number of grader processes and their limits.
        urls: verifier services; none: grader processes of this process, started at the first use.
        token: secret of the services.
    """
    async with contextlib.AsyncExitStack() as stack:
        verifier: Verifier
        if urls:
            session = await stack.enter_async_context(open_session())
            verifier = RemoteVerifier(Services("verifier", urls, token, session, _GRADING_TIMEOUT_S))
        else:
            verifier = await stack.enter_async_context(local_pool(config))
        previous = _verifier.set(verifier)
        try:
            yield verifier
        finally:
            _verifier.reset(previous)


class Environments:
    """The environment services of a run, for text games and for a user's own requests.

    Attributes:
        urls: their addresses; may be none.
        session: a session for requests to them; None without services.
        headers: to send with each request.
    """

    def __init__(self, services: Services, session: aiohttp.ClientSession | None) -> None:
        self._services, self.session = services, session
        self.urls, self.headers = list(services.load), services.headers

    def __bool__(self) -> bool:
        return bool(self.urls)

    async def open_game(self, game: str, problem: dict[str, Any]) -> RemoteGame:
        """Begin a game of the class at the dotted path `game` in the service with the fewest games of this worker.

        Raises:
            RetryableRolloutError: no service accepted it.
            RolloutError: the game could not begin.
        """
        url, reply = await self._services.ask(OpenGame(game, problem))
        if isinstance(reply, GameOpened):
            return RemoteGame(self._services, url, reply)
        self._services.load[url] -= 1
        raise _error_of(reply, url)


class RemoteGame:
    """A game in an environment service."""

    def __init__(self, services: Services, url: str, opened: GameOpened) -> None:
        self._services, self._url, self._opened = services, url, opened

    async def start(self) -> str:
        """Return the first text for the model."""
        return self._opened.text

    async def act(self, action: str) -> GameStep:
        """Make a move.

        Raises:
            RolloutError: the game failed; `RetryableRolloutError` where that says nothing about the game.
        """
        reply = await self._services.send(self._url, ActInGame(clean_text(action), self._opened.number))
        if isinstance(reply, GameStep):
            return reply
        raise _error_of(reply, self._url)

    async def close(self) -> None:
        """End the game; the service closes idle games if this does not reach it."""
        self._services.load[self._url] -= 1
        with contextlib.suppress(RolloutError):
            await self._services.send(self._url, CloseGame(self._opened.number))


def _error_of(reply: Reply, url: str) -> RolloutError:
    if isinstance(reply, Failed):
        return error_of(reply)
    return RetryableRolloutError("environment_unreachable", f"{url}: an answer out of turn")


_environments: ContextVar[Environments | None] = ContextVar("pipelinerl_environments", default=None)


def current_environments() -> Environments:
    """Return the environment services of the running rollout; there may be none."""
    return _environments.get() or Environments(Services("environment", [], "", None, 0), None)


@contextlib.asynccontextmanager
async def open_environments(urls: Sequence[str], token: str = "") -> AsyncIterator[Environments]:
    """Make services current for this task and the tasks that it starts."""
    async with open_session() as session:
        services = Services("environment", urls, token, session, _GAME_TIMEOUT_S)
        environments = Environments(services, session)
        previous = _environments.set(environments)
        try:
            yield environments
        finally:
            _environments.reset(previous)
