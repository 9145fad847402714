"""`@grader` marks the functions that may be called by name in a grader process; `load_grader` finds one.

Called by domains (the mark) and by grader processes and checks (the search). Waits for nothing but imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from pipelinerl.errors import DomainError

GraderFunction = Callable[..., Any]
F = TypeVar("F", bound=GraderFunction)
_MARK = "__pipelinerl_grader__"


@overload
def grader(function: F) -> F: ...
@overload
def grader(*, confined: bool) -> Callable[[F], F]: ...
def grader(function: Any = None, *, confined: bool = True) -> Any:
    """Mark `function(text, problem, **params) -> Grade | float` as a grader.

    It runs in a process of its own, with a deadline and a memory limit, and never in the process of the rollouts. A
    confined one cannot start programs, open connections, or write files while it grades: that is the second wall
    behind parsers of libraries that were not written for text from strangers.
    """

    def mark(target: F) -> F:
        setattr(target, _MARK, confined)
        return target

    return mark(function) if function is not None else mark


def grader_path(function: GraderFunction | str) -> str:
    """Return the dotted path under which grader processes find `function`.

    A path is returned as it is: naming a grader saves its module's imports where it only is asked for.

    Raises:
        DomainError: it is not marked, or is not a function at the top of a module.
    """
    if isinstance(function, str):
        return function
    path = f"{function.__module__}.{function.__qualname__}"
    if not hasattr(function, _MARK):
        raise DomainError(f"{path} is no grader, expected a function marked with @grader. Add the mark.")
    if "<" in function.__qualname__ or "." in function.__qualname__:
        raise DomainError(f"{path} cannot be found by name, expected a function at the top of a module. Move it.")
    return path


def load_grader(path: str) -> tuple[GraderFunction, bool]:
    """Import a grader; return it and whether it is confined.

    Raises:
        DomainError: there is no such function, or it is not marked: other functions cannot be called by name.
    """
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise DomainError(f"grader {path!r}: importing {module_name!r} failed: {error}") from error
    if not callable(function) or not hasattr(function, _MARK):
        raise DomainError(f"grader {path!r}: expected a function that is marked with @grader. Add the mark.")
    return function, bool(getattr(function, _MARK))
