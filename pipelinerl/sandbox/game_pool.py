"""A fixed number of game processes with deadlines that hold. Used by the environment service.

Each process holds many games and plays one move at a time. One that misses a deadline for good is killed: its other
games are lost, and their rollouts are tried again. Waits for the process of a game, then for the move.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from pipelinerl.sandbox.children import Child, start_child
from pipelinerl.sandbox.game_messages import (
    ActInGame,
    CloseGame,
    GameAnswer,
    GameFailed,
    GameOpened,
    GameStep,
    OpenGame,
)
from pipelinerl.sandbox.game_process import TimedRequest
from pipelinerl.sandbox.messages import Load, Loaded, clean_text, frame, read_payload

LOAD_TIMEOUT_S = 120.0
_KILL_GRACE_S = 0.5
_OPENING_ATTEMPTS = 3
_decode = msgspec.msgpack.Decoder(Loaded | GameOpened | GameStep | GameFailed).decode
_encode = msgspec.msgpack.Encoder().encode
_Reply = Loaded | GameOpened | GameStep | GameFailed


@dataclass(eq=False)
class _Process:
    child: Child
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    loaded: set[str] = field(default_factory=set)
    games: set[int] = field(default_factory=set)


class GamePool:
    """At most `size` game processes, started when they are first needed. Use as an async context manager.

    Args:
        size: processes, and so moves that are made at the same time; further ones queue.
        timeout_s: deadline of one move, and of the beginning of a game.
        memory_bytes: address space of a process.
        max_games: games at the same time; one more is refused with `environment_busy`.
        idle_timeout_s: a game without a move for so long is closed when another one begins.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float,
        memory_bytes: int,
        max_games: int,
        idle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._timeout_s, self._memory_bytes = size, timeout_s, memory_bytes
        self._max_games, self._idle_timeout_s = max_games, idle_timeout_s
        self._clock = clock
        self._processes: list[_Process] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._games: dict[int, _Process] = {}
        self._last_used: dict[int, float] = {}
        self.outcomes: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in list(self._processes):
            await self._end(process)

    @property
    def num_games(self) -> int:
        return len(self._last_used)

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    async def open(self, request: OpenGame) -> GameOpened | GameFailed:
        """Begin a game. Always returns."""
        await self._close_idle()
        # Counted with those whose process is not known yet, so that many beginnings at once do not pass the limit.
        if len(self._last_used) >= self._max_games:
            return self._counted(GameFailed("environment_busy", f"{len(self._last_used)} games are played already"))
        number = next(self._numbers)
        try:
            answer = await self._begin(number, request)
        except BaseException:
            self._forget(number)
            raise
        if isinstance(answer, GameOpened):
            return answer
        self._forget(number)
        return self._counted(answer if isinstance(answer, GameFailed) else _out_of_turn())

    async def _begin(self, number: int, request: OpenGame) -> _Reply:
        answer: _Reply = _out_of_turn()
        for _ in range(_OPENING_ATTEMPTS):
            self._last_used[number] = self._clock()
            process = await self._least_busy()
            self._games[number] = process
            process.games.add(number)
            answer = await self._ask(process, msgspec.structs.replace(request, number=number), request.game)
            if isinstance(answer, GameOpened):
                self._last_used[number] = self._clock()
                break
            if not isinstance(answer, GameFailed) or answer.reason != "environment_lost":
                break  # else another game ended the process before it was this one's turn
        return answer

    async def act(self, number: int, text: str) -> GameAnswer:
        """Make a move. Always returns; the deadline starts when it is this game's turn."""
        process = self._games.get(number)
        if process is None:
            return self._counted(GameFailed("environment_lost", f"no game {number}: its process ended, or it was idle"))
        self._last_used[number] = self._clock()
        answer = await self._ask(process, ActInGame(clean_text(text), number), f"game {number}")
        if isinstance(answer, GameStep):
            return answer
        self._forget(number)
        return self._counted(answer if isinstance(answer, GameFailed) else _out_of_turn())

    async def close(self, number: int) -> None:
        """End a game; one that is not there is no error."""
        process = self._games.get(number)
        if process is not None:
            self._forget(number)
            await self._ask(process, CloseGame(number), f"closing game {number}")

    async def _close_idle(self) -> None:
        oldest = self._clock() - self._idle_timeout_s
        for number in [number for number in self._games if self._last_used.get(number, oldest) < oldest]:
            await self.close(number)

    async def _least_busy(self) -> _Process:
        async with self._starting:
            if len(self._processes) < self._size:
                self._processes.append(
                    _Process(await start_child("pipelinerl.sandbox.game_process", self._memory_bytes))
                )
                return self._processes[-1]
        return min(self._processes, key=lambda each: len(each.games))

    async def _ask(self, process: _Process, request: OpenGame | ActInGame | CloseGame, what: str) -> _Reply:
        async with process.turn:
            if process not in self._processes:
                return GameFailed("environment_lost", f"{what}: the process of this game ended")
            if isinstance(request, OpenGame) and request.game not in process.loaded:
                loaded = await self._exchange(process, Load(request.game), LOAD_TIMEOUT_S, f"importing {request.game}")
                if not isinstance(loaded, Loaded):
                    return loaded
                process.loaded.add(request.game)
            return await self._exchange(process, request, self._timeout_s, what)

    async def _exchange(
        self, process: _Process, request: Load | OpenGame | ActInGame | CloseGame, timeout_s: float, what: str
    ) -> _Reply:
        try:
            payload = _encode(TimedRequest(request, timeout_s))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return GameFailed("environment_bad_request", f"{what} cannot be sent to its process: {error}")
        try:
            async with asyncio.timeout(timeout_s + _KILL_GRACE_S):
                process.child.writer.write(frame(payload))
                answer = await read_payload(process.child.reader)
            if answer is not None:
                return _decode(answer)
            failure = GameFailed("environment_died", f"{what}: its process ended")
        except TimeoutError:
            failure = GameFailed("environment_timeout", f"{what} took more than {timeout_s:g} s, so its process ends")
        except ConnectionError:
            failure = GameFailed("environment_died", f"{what}: its process ended")
        except asyncio.CancelledError:
            # The answer that is under way belongs to nobody any more: this process cannot be used again.
            await asyncio.shield(self._end(process))
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            failure = GameFailed("environment_bad_result", f"{what}: {error}")
        await self._end(process)
        return failure

    async def _end(self, process: _Process) -> None:
        if process in self._processes:
            self._processes.remove(process)
        for number in list(process.games):
            self._forget(number)
        await process.child.end()

    def _forget(self, number: int) -> None:
        process = self._games.pop(number, None)
        self._last_used.pop(number, None)
        if process is not None:
            process.games.discard(number)

    def _counted(self, failure: GameFailed) -> GameFailed:
        self.outcomes[failure.reason] += 1
        return failure


def _out_of_turn() -> GameFailed:
    return GameFailed("environment_bad_result", "an answer out of turn")
