"""How a rollout reaches the environment services of its run, and plays text games in them.

The rollout worker opens them; `current_environments` finds them through the context of the running task. Waits for the
services; deadlines of moves are theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

import aiohttp
import msgspec

from pipelinerl.errors import RetryableRolloutError, RolloutError
from pipelinerl.sandbox.game_messages import (
    GAMES_PATH,
    ActInGame,
    GameFailed,
    GameOpened,
    GameStep,
    OpenGame,
    error_of,
)
from pipelinerl.sandbox.messages import clean_text

_ATTEMPTS = 5
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 4.0
# A service that died is started again in place.
RETURN_TIMEOUT_S = 120.0
_TIMEOUT_S = 600.0
_QUOTED_BYTES = 300
_decode = msgspec.json.Decoder(GameOpened | GameStep | GameFailed).decode
_encode = msgspec.json.Encoder().encode
_Reply = GameOpened | GameStep | GameFailed


class Environments:
    """The environment services of a run.

    Args:
        urls: their addresses; may be none.
        headers: to send with every request: the run's token.
        session: for requests to them.
        return_timeout_s: how long a game may wait to begin while a service is started again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        headers: dict[str, str],
        session: aiohttp.ClientSession | None,
        return_timeout_s: float = RETURN_TIMEOUT_S,
    ) -> None:
        self._return_timeout_s = return_timeout_s
        self.urls = [url.rstrip("/") for url in urls]
        self.headers = headers
        self.session = session
        self._playing = dict.fromkeys(self.urls, 0)

    def __bool__(self) -> bool:
        return bool(self.urls)

    async def open_game(self, game: str, problem: dict[str, Any]) -> RemoteGame:
        """Begin a game of the class at the dotted path `game` in the service with the fewest games of this worker.

        Raises:
            RetryableRolloutError: no service took it.
            RolloutError: the game could not begin.
        """
        try:
            body = _encode(OpenGame(game, problem))
        except (TypeError, ValueError, OverflowError) as error:
            raise RolloutError("environment_bad_request", f"the problem cannot be sent: {error}") from error
        avoid = ""
        give_up_at = time.monotonic() + self._return_timeout_s
        for attempt in itertools.count(1):
            is_away = False
            url = min(self._playing, key=lambda each: (each == avoid, self._playing[each]))
            self._playing[url] += 1
            taken = False
            try:
                answer = await self.request("POST", url + GAMES_PATH, body)
                if isinstance(answer, GameOpened):
                    taken = True
                    return RemoteGame(self, url, answer)
                if isinstance(answer, GameFailed) and answer.reason != "environment_busy":
                    raise error_of(answer)
                trouble = f"{url}: {answer}"
            except RetryableRolloutError as error:
                if error.reason != "environment_unreachable":
                    raise
                trouble = str(error)
                is_away = isinstance(error.__cause__, aiohttp.ClientError | ConnectionError)
                is_away = is_away and not isinstance(error.__cause__, TimeoutError)
            finally:
                self._playing[url] -= not taken
            avoid = url
            if attempt >= _ATTEMPTS and not (is_away and time.monotonic() < give_up_at):
                raise RetryableRolloutError("environment_unreachable", f"{trouble} ({attempt} attempts)")
            await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** (attempt - 1), _LONGEST_DELAY_S))
        raise AssertionError("unreachable")

    def forget(self, url: str) -> None:
        """Note that a game of this service is over."""
        self._playing[url] -= 1

    async def request(self, method: str, url: str, body: bytes | None = None) -> _Reply | None:
        """Send one request and return the answer, None if it is empty.

        Raises:
            RetryableRolloutError: the service does not answer, or not properly.
            RolloutError: it refuses the request.
        """
        assert self.session is not None
        try:
            async with self.session.request(
                method, url, data=body, headers=self.headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise RetryableRolloutError("environment_unreachable", f"{url}: {type(error).__name__}: {error}") from error
        text = content[:_QUOTED_BYTES].decode(errors="replace")
        if response.status == 429 or response.status >= 500:
            raise RetryableRolloutError("environment_unreachable", f"{url}: status {response.status}: {text}")
        if response.status >= 300:
            raise RolloutError("environment_refused", f"{url}: status {response.status}: {text}")
        try:
            return _decode(content) if content else None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RetryableRolloutError("environment_unreachable", f"{url}: no answer of a game: {error}") from error


class RemoteGame:
    """A game in an environment service. `text` is what the model sees first."""

    def __init__(self, environments: Environments, url: str, opened: GameOpened) -> None:
        self.text = opened.text
        self._environments = environments
        self._service = url
        self._url = f"{url}{GAMES_PATH}/{opened.number}"

    async def start(self) -> str:
        return self.text

    async def act(self, action: str) -> GameStep:
        """Make a move.

        Raises:
            RolloutError: the game failed; a kind that may be tried again where that says nothing about the game.
        """
        answer = await self._environments.request("POST", self._url, _encode(ActInGame(clean_text(action))))
        if isinstance(answer, GameStep):
            return answer
        if isinstance(answer, GameFailed):
            raise error_of(answer)
        raise RetryableRolloutError("environment_unreachable", f"{self._url}: an answer out of turn")

    async def close(self) -> None:
        """End the game; the service forgets it by itself if this does not reach it."""
        self._environments.forget(self._service)
        with contextlib.suppress(RolloutError):
            await self._environments.request("DELETE", self._url)


_current: ContextVar[Environments | None] = ContextVar("pipelinerl_environments", default=None)


def current_environments() -> Environments:
    """Return the environment services of the running rollout; there may be none."""
    return _current.get() or Environments([], {}, None)


@contextlib.asynccontextmanager
async def open_environments(
    urls: Sequence[str], token: str = "", return_timeout_s: float = RETURN_TIMEOUT_S
) -> AsyncIterator[Environments]:
    """Make services current for this task and the tasks that it starts."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:
        environments = Environments(
            urls, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}, session, return_timeout_s
        )
        previous = _current.set(environments)
        try:
            yield environments
        finally:
            _current.reset(previous)
