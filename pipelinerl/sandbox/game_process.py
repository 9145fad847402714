"""One process of games: makes them, plays moves, closes them. Started by `GamePool`, never by hand.

Waits for the next request. A game that misses its deadline or raises is dropped; the others go on. Ends when the socket
or its parent is gone.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec

from pipelinerl.errors import DomainError
from pipelinerl.sandbox.child_main import DeadlineReached, deadline, run_child
from pipelinerl.sandbox.game_messages import (
    ActInGame,
    CloseGame,
    GameAnswer,
    GameFailed,
    GameOpened,
    GameStep,
    OpenGame,
    TextGame,
    as_step,
    load_game,
)
from pipelinerl.sandbox.messages import Load, Loaded, clean_text, frame, receive_payload

_TRACE_LINES = 3


class TimedRequest(msgspec.Struct):
    """A request and the seconds that it may take."""

    request: Load | OpenGame | ActInGame | CloseGame
    timeout_s: float


Reply = Loaded | GameOpened | GameAnswer


class GameProcess:
    """Serves `connection` until it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._games: dict[int, TextGame] = {}
        self._decode = msgspec.msgpack.Decoder(TimedRequest).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self) -> None:
        """Answer requests one by one."""
        while (payload := receive_payload(self._connection)) is not None:
            timed = self._decode(payload)
            answer = self._answer_in_time(timed.request, timed.timeout_s)
            self._connection.sendall(frame(self._encode(answer)))

    def _answer_in_time(self, request: Load | OpenGame | ActInGame | CloseGame, timeout_s: float) -> Reply:
        if isinstance(request, Load):
            return self._load(request.grader)
        if isinstance(request, CloseGame):
            return self._guarded(request.number, timeout_s, lambda: self._close(request.number))
        if isinstance(request, OpenGame):
            return self._guarded(request.number, timeout_s, lambda: self._open(request))
        return self._guarded(request.number, timeout_s, lambda: self._act(request))

    def _guarded(self, number: int, timeout_s: float, run: Callable[[], Reply]) -> Reply:
        """Run foreign code; a game in which it fails is over."""
        try:
            with deadline(timeout_s):
                answer = run()
        except DeadlineReached:
            answer = GameFailed("environment_timeout", f"took more than {timeout_s:g} s")
        except MemoryError:
            answer = GameFailed("environment_memory", "needed more memory than it may have")
        except Exception as error:  # noqa: BLE001 - a game may raise anything; it fails this rollout only
            lines = traceback.format_exception(error, limit=-_TRACE_LINES)
            answer = GameFailed("environment_raised", clean_text("".join(lines))[-2000:])
        if isinstance(answer, GameFailed):
            self._games.pop(number, None)
        return answer

    def _load(self, path: str) -> Loaded | GameFailed:
        try:
            load_game(path)
        except DomainError as error:
            return GameFailed("environment_missing", str(error))
        return Loaded(path)

    def _open(self, request: OpenGame) -> GameOpened:
        game: TextGame = load_game(request.game)(request.problem)
        self._games[request.number] = game
        return GameOpened(request.number, clean_text(str(game.start())))

    def _act(self, request: ActInGame) -> GameAnswer:
        game = self._games.get(request.number)
        if game is None:
            return GameFailed("environment_lost", f"no game {request.number}")
        step = as_step(game.act(request.text))
        if isinstance(step, GameFailed):
            return step
        # Plain values: a flag of NumPy, say, could not be sent, and that would end this process with all its games.
        return GameStep(clean_text(step.observation), float(step.reward), bool(step.done), bool(step.valid))

    def _close(self, number: int) -> Reply:
        game = self._games.pop(number, None)
        with contextlib.suppress(Exception):
            if game is not None:
                game.close()
        return Loaded("")


def main() -> int:
    return run_child(lambda connection: GameProcess(connection).serve())


if __name__ == "__main__":
    sys.exit(main())
