"""What rollouts, environment services and game processes say to each other about a game. Plain data; pure."""

from __future__ import annotations

import importlib
import math
from typing import Any, Protocol, TypeVar

import msgspec

from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError

#: Reasons that say nothing about the game itself: the rollout is tried again.
PASSING_REASONS = ("environment_busy", "environment_lost")
GAMES_PATH = "/games"
_MARK = "__pipelinerl_game__"
G = TypeVar("G", bound=type)


class GameStep(msgspec.Struct, frozen=True, tag="step"):
    """What came of an action: the next text for the model, the reward of this step, and whether the game is over."""

    observation: str
    reward: float
    done: bool
    valid: bool = True


class GameFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The game gave no step and is over. `reason` is a short word that is counted; the rollout is failed."""

    reason: str
    message: str = ""


class OpenGame(msgspec.Struct, tag="open"):
    """Begin a game of the class at the dotted path `game` with `problem`."""

    game: str
    problem: dict[str, Any]
    number: int = 0


class ActInGame(msgspec.Struct, tag="act"):
    """Make the move that is stated in a model's text."""

    text: str
    number: int = 0


class CloseGame(msgspec.Struct, tag="close"):
    number: int


class GameOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The game has begun under `number`; `text` is what the model sees first."""

    number: int
    text: str


GameAnswer = GameStep | GameFailed


class TextGame(Protocol):
    """A game in progress."""

    def start(self) -> str: ...

    def act(self, action: str) -> GameStep: ...

    def close(self) -> None: ...


def text_game(target: G) -> G:
    """Mark a class, called with a problem, as a game that an environment service may make by its name."""
    setattr(target, _MARK, True)
    return target


def load_game(path: str, *, marked: bool = True) -> Any:
    """Import the class at a dotted path.

    Args:
        marked: it has to carry `@text_game`: nothing else can be called by name from another process.

    Raises:
        DomainError: there is none.
    """
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise DomainError(f"game {path!r}: importing {module_name!r} failed: {error}") from error
    if not callable(found) or (marked and not hasattr(found, _MARK)):
        raise DomainError(f"game {path!r}: expected a class that is marked with @text_game. Add the mark.")
    return found


def as_step(value: Any) -> GameAnswer:
    """Read what `act` returned; a reward that is no finite number is a failure, never 0."""
    if isinstance(value, GameStep) and isinstance(value.observation, str) and math.isfinite(value.reward):
        return value
    return GameFailed("environment_bad_result", f"act returned {str(value)[:300]}, expected a GameStep")


def error_of(failure: GameFailed) -> RolloutError:
    """Return the rollout's error for a failure."""
    kind = RetryableRolloutError if failure.reason in PASSING_REASONS else RolloutError
    return kind(failure.reason, failure.message)
