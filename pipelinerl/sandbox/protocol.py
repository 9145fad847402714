"""What rollouts, services and sandboxed processes say to each other, and the marks on functions and classes.

Messages travel as msgpack between processes and as JSON over HTTP: plain data, so neither end can make the other run
anything but functions and classes marked with `@grader` and `@text_game`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, get_args, overload

import msgspec

from pipelinerl.errors import DomainError, RetryableRolloutError, RolloutError

SERVICE_PATH = "/ask"
#: In the details of a grade, and a metric.
OVER_LIMIT = "over_limit"
_QUOTED_CHARACTERS = 300

GradeStatus = Literal["correct", "wrong", "no_answer", "unparsable"]
SandboxKind = Literal["grader", "environment"]
GraderFunction = Callable[..., Any]
F = TypeVar("F", bound=GraderFunction)
G = TypeVar("G", bound=type)
_GRADER_MARK = "__pipelinerl_grader__"
_GAME_MARK = "__pipelinerl_game__"


class Grade(msgspec.Struct, frozen=True, tag="grade"):
    """The result of a grader.

    Attributes:
        score: 1 is right.
        status: `correct`, `wrong`, `no_answer` (the text has no answer) or `unparsable` (it cannot be read).
        details: numbers for the metrics.
    """

    score: float
    status: GradeStatus
    details: dict[str, float] = {}


#: The grade of an answer that could not be graded within the limits of processor time and memory.
OVER_LIMIT_GRADE = Grade(0.0, "unparsable", {OVER_LIMIT: 1.0})


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """No grade, or no step of a game, through no fault of the answer. The rollout has failed and is never scored 0.

    Attributes:
        reason: a short word that is counted, such as `grader_raised`.
        transient: the reason may pass, so the rollout is retried.
    """

    reason: str
    message: str = ""
    transient: bool = False


class GradeRequest(msgspec.Struct, tag="request"):
    """Grade `text` with the function at the dotted path `grader`, in `timeout_s` of processor time (None: default)."""

    grader: str
    text: str
    problem: dict[str, Any]
    params: dict[str, Any] = {}
    timeout_s: float | None = None


class Load(msgspec.Struct, tag="load"):
    """Import a grader or a game now, so that its imports do not count against a deadline."""

    kind: SandboxKind
    path: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The reply to `Load` and `CloseGame`."""


class GameStep(msgspec.Struct, frozen=True, tag="step"):
    """The result of an action: the next text for the model, the reward of this step, and whether the game is over."""

    observation: str
    reward: float
    done: bool
    valid: bool = True


class OpenGame(msgspec.Struct, tag="open"):
    """Begin a game of the class at the dotted path `game` with `problem`."""

    game: str
    problem: dict[str, Any]
    number: int = 0


class ActInGame(msgspec.Struct, tag="act"):
    """Make the move stated in a model's text."""

    text: str
    number: int = 0


class CloseGame(msgspec.Struct, tag="close"):
    number: int


class GameOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The game has begun under `number`; `text` is what the model sees first."""

    number: int
    text: str


GameRequest = OpenGame | ActInGame | CloseGame
Request = Load | GradeRequest | OpenGame | ActInGame | CloseGame
Reply = Done | Grade | GameOpened | GameStep | Failed
GradeAnswer = Grade | Failed


class TimedRequest(msgspec.Struct):
    """A request to a sandboxed process, the seconds that it may take, and how many of them it may work."""

    request: Request
    timeout_s: float
    cpu_s: float | None = None


class TextGame(Protocol):
    """A game in progress."""

    def start(self) -> str: ...

    def act(self, action: str) -> GameStep: ...

    def close(self) -> None: ...


@overload
def grader(function: F) -> F: ...
@overload
def grader(*, confined: bool = True, preload: str | None = None) -> Callable[[F], F]: ...
def grader(function: Any = None, *, confined: bool = True, preload: str | None = None) -> Any:
    """Mark `function(text, problem, **params) -> Grade | float` as a grader.

    It runs in a process of its own, with a deadline and a memory limit.

    Args:
        confined: the function cannot start programs, open connections or write files while it grades.
        preload: a module to import along with the function, before the first deadline starts.
    """

    def mark(target: F) -> F:
        setattr(target, _GRADER_MARK, (confined, preload))
        return target

    return mark(function) if function is not None else mark


def grader_path(function: GraderFunction | str) -> str:
    """Return the dotted path of a grader; a path is returned unchanged.

    Raises:
        DomainError: it is not marked, or is not a function at the top of a module.
    """
    if isinstance(function, str):
        return function
    path = f"{function.__module__}.{function.__qualname__}"
    if not hasattr(function, _GRADER_MARK):
        raise DomainError(f"{path} is not a grader, expected a function marked with @grader. Add the mark.")
    if "<" in function.__qualname__ or "." in function.__qualname__:
        raise DomainError(f"{path} cannot be found by name, expected a function at the top of a module. Move it.")
    return path


def load_grader(path: str) -> tuple[GraderFunction, bool]:
    """Import a grader and return it with whether it is confined.

    Raises:
        DomainError: there is no such function, or it is not marked.
    """
    function = load_named(path, "grader", "a function marked with @grader", _GRADER_MARK)
    confined, preload = getattr(function, _GRADER_MARK)
    if preload is not None:
        importlib.import_module(preload)
    return function, confined


def text_game(target: G) -> G:
    """Mark a class, called with a problem, as a game that an environment service may create by name."""
    setattr(target, _GAME_MARK, True)
    return target


def load_game(path: str, *, marked: bool = True) -> Any:
    """Import the game class at a dotted path.

    Args:
        marked: it must carry `@text_game`; nothing else can be called by name from another process.

    Raises:
        DomainError: there is none.
    """
    return load_named(path, "game", "a class marked with @text_game", _GAME_MARK if marked else None)


def load_named(path: str, what: str, expected: str, mark: str | None = None) -> Any:
    """Import the function or class at a dotted path.

    Args:
        what: of the run it is, for messages.
        mark: an attribute that it must have.

    Raises:
        DomainError: there is none, or importing its module failed.
    """
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise DomainError(
            f"{what} {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(found) or (mark is not None and not hasattr(found, mark)):
        raise DomainError(f"{what} {path!r}: expected {expected}.")
    return found


def as_grade(value: Any) -> GradeAnswer:
    """Read the value a grader returned: a `Grade` or a number. 0.0 stays 0.0; None, NaN and others are a failure."""
    if isinstance(value, Grade):
        fault = _fault_of(value)
        if fault is None:
            return value
        return Failed("grader_bad_result", f"the grader returned {str(value)[:_QUOTED_CHARACTERS]}: {fault}")
    if _is_number(value):
        return Grade(float(value), "correct" if value >= 1 else "wrong")
    shown = repr(value)[:_QUOTED_CHARACTERS]
    return Failed("grader_bad_result", f"the grader returned {shown}, expected a Grade or a finite number")


def _fault_of(grade: Grade) -> str | None:
    if not _is_number(grade.score):
        return f"score is {grade.score!r}, expected a finite number"
    if grade.status not in get_args(GradeStatus):
        return f"status is {grade.status!r}, expected one of {', '.join(map(repr, get_args(GradeStatus)))}"
    if not isinstance(grade.details, dict):
        return f"details are a {type(grade.details).__name__}, expected a dict of numbers for the metrics"
    for name, number in grade.details.items():
        if not isinstance(name, str) or not _is_number(number):
            return f"details has {name!r}: {number!r}, expected names with finite numbers"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def as_step(value: Any) -> GameStep | Failed:
    """Read the value `act` returned, as plain types; a reward that is not a finite number is a failure, never 0."""
    if isinstance(value, GameStep) and isinstance(value.observation, str) and math.isfinite(value.reward):
        # A NumPy flag, for example, could not be sent.
        return GameStep(clean_text(value.observation), float(value.reward), bool(value.done), bool(value.valid))
    shown = str(value)[:_QUOTED_CHARACTERS]
    return Failed("environment_bad_result", f"act returned {shown}, expected a GameStep with a finite reward")


def error_of(failure: Failed) -> RolloutError:
    """Return the rollout's error for a failure; `RetryableRolloutError` if it is transient."""
    return (RetryableRolloutError if failure.transient else RolloutError)(failure.reason, failure.message)


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no encoding can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
