"""Makes environments of the package verifiers and keeps them, one of each in a process.

Called by loader, rollout and grader. Waits for the environment's own code: imports, and its data set.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import datasets
import verifiers
from verifiers.envs import environment as environment_module

from pipelinerl.errors import DomainError

_lock = threading.Lock()


class RewardFunctionError(BaseException):
    """A reward function raised. Not an `Exception`: the package takes those for a reward of 0."""


def environment_of(env_id: str, env_args: Mapping[str, Any]) -> Any:
    """Return the environment `env_id`, made with `env_args` at the first call in this process.

    Args:
        env_id: as for `verifiers.load_environment`, or the dotted path of a class or function that returns one.

    Raises:
        DomainError: there is none, it cannot be made, or it scores whole groups.
    """
    with _lock:
        return _make(env_id, json.dumps(dict(env_args), sort_keys=True))


@functools.lru_cache(maxsize=32)
def _make(env_id: str, env_args: str) -> Any:
    arguments = json.loads(env_args)
    datasets.disable_progress_bars()
    with _own_signal_handlers():
        try:
            made = _factory(env_id)(**arguments)
        except DomainError:
            raise
        except Exception as error:
            raise DomainError(
                f"verifiers: the environment {env_id!r} cannot be made with {arguments}: {type(error).__name__}: "
                f"{error}. Is its package installed?"
            ) from error
    if not isinstance(made, verifiers.Environment):
        raise DomainError(f"verifiers: {env_id!r} is a {type(made).__name__}, expected an Environment of verifiers.")
    for rubric in _rubrics(made.rubric):
        if any(rubric._is_group_func(function) for function in rubric.funcs):
            raise DomainError(f"verifiers: {env_id!r} rewards whole groups at once, expected rewards of one rollout.")
        rubric.funcs = [_telling(function) for function in rubric.funcs]
    return made


def _factory(env_id: str) -> Callable[..., Any]:
    if "." not in env_id:
        return functools.partial(verifiers.load_environment, env_id)
    module, _, name = env_id.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise DomainError(f"verifiers: {module} has no {name!r}, expected a class or function for an environment.")
    return found  # type: ignore[no-any-return]


def _rubrics(rubric: Any) -> list[Any]:
    """Return the single rubrics of a group of rubrics."""
    return [each for part in getattr(rubric, "rubrics", []) for each in _rubrics(part)] or [rubric]


def _telling(function: Any) -> Any:
    """Return the reward function with exceptions that are seen: an error is no reward of 0."""

    async def awaited(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            raise RewardFunctionError(f"{type(error).__name__}: {error}") from error

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            raise RewardFunctionError(f"{type(error).__name__}: {error}") from error
        return awaited(result) if inspect.isawaitable(result) else result

    return call


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep an environment from putting its own handlers for SIGINT and SIGTERM into this process."""
    stand_in = SimpleNamespace(
        signal=lambda number, handler: None,
        SIGINT=signal.SIGINT,
        SIGTERM=signal.SIGTERM,
        default_int_handler=signal.default_int_handler,
    )
    environment_module.signal = stand_in  # type: ignore[attr-defined]
    try:
        yield
    finally:
        environment_module.signal = signal  # type: ignore[attr-defined]
