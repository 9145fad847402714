"""Environments of the package verifiers as domains: any of them by its id or its class, with its own rubric.

The environment asks the model through the recording endpoint for black-box agents, so its code is used as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from pipelinerl.agents import black_box
from pipelinerl.domains.data import check_names, optional
from pipelinerl.errors import DomainError
from pipelinerl.grading import verify
from pipelinerl.sandbox.protocol import Grade, grader, load_named

_ROW_KEYS = ("prompt", "answer", "info", "task", "example_id")
# Where the environment has no evaluation data, at most one row of so many is kept out of training.
_LEAST_TRAINED = 5


def load_problems(
    dataset_names: Sequence[str],
    *,
    env_id: str,
    env_args: Mapping[str, Any] | None = None,
    num_train: int | None = None,
    num_test: int = 100,
    success_reward: float = 1.0,
    score_in: Literal["process", "worker"] = "process",
    score_timeout_s: float = 60.0,
) -> list[dict[str, Any]]:
    """Return the rows for `train` and `test`.

    Args:
        env_id: as for `verifiers.load_environment`, or the dotted path of a class or function that returns one.
        env_args: its arguments.
        num_train: rows of its data set; None: all.
        num_test: rows of its evaluation data set; if it has none, as many (a fifth at most) are kept out of the
            other one.
        success_reward: from which reward on a rollout is a success.
        score_in: `process`: the rubric runs in a grader process, on the plain parts of a rollout's state. `worker`:
            where the rollout runs, with its whole state; for rubrics that ask another model, or need live objects.
        score_timeout_s: deadline of the rubric in a grader process.

    Raises:
        DomainError: the package or the environment is missing, or it cannot be used here.
    """
    check_names("verifiers", dataset_names)
    if score_in not in ("process", "worker"):
        raise DomainError(f"verifiers: score_in: got {score_in!r}, expected process or worker.")
    arguments = dict(env_args or {})
    environment = environment_of(env_id, arguments)
    if environment.message_type != "chat":
        raise DomainError(f"verifiers: {env_id!r} completes text, expected an environment of chats.")
    train, test = _rows(environment, num_test)
    common = {
        "env_id": env_id,
        "env_args": arguments,
        "success_reward": success_reward,
        "score_in": score_in,
        "score_timeout_s": score_timeout_s,
    }
    rows = {"train": train[:num_train], "test": test}
    return [
        {
            "id": f"verifiers-{name}-{index}",
            "dataset": name,
            "row": {key: row[key] for key in _ROW_KEYS if key in row},
            **common,
        }
        for name in dataset_names
        for index, row in enumerate(rows[name])
    ]


def _rows(environment: Any, num_test: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and held-out rows."""
    if environment.dataset is None:
        held_out = [dict(row) for row in environment.eval_dataset]
        return held_out[num_test:], held_out[:num_test]
    rows = [dict(row) for row in environment.dataset]
    if environment.eval_dataset is not None:
        return rows, [dict(row) for row in environment.eval_dataset][:num_test]
    kept_out = min(num_test, len(rows) // _LEAST_TRAINED)
    return rows[: len(rows) - kept_out], rows[len(rows) - kept_out :]


_lock = threading.Lock()


def _package(name: str) -> Any:
    return optional(name, "verifiers", "verifiers")


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
    verifiers = _package("verifiers")
    arguments = json.loads(env_args)
    _package("datasets").disable_progress_bars()
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
        return functools.partial(_package("verifiers").load_environment, env_id)
    found: Callable[..., Any] = load_named(env_id, "verifiers: env_id", "a class or function for an environment")
    return found


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
    environment_module = _package("verifiers.envs.environment")
    stand_in = SimpleNamespace(
        signal=lambda number, handler: None,
        SIGINT=signal.SIGINT,
        SIGTERM=signal.SIGTERM,
        default_int_handler=signal.default_int_handler,
    )
    environment_module.signal = stand_in
    try:
        yield
    finally:
        environment_module.signal = signal


# Of this process, or of no use to a rubric.
_NOT_SENT = ("client", "oai_tools", "sampling_args", "model")


# Environments read their data sets from caches and may lock files there.
@grader(confined=False, preload="verifiers")
def score_verifiers(text: str, problem: dict[str, Any], *, state: dict[str, Any]) -> Grade:
    """Return the rubric's reward of the plain `state` (see `plain_state`), its metrics among the details.

    Raises:
        ValueError: a reward function raised.
    """
    state_type = _package("verifiers.types").State
    environment = environment_of(problem["env_id"], problem["env_args"])
    return asyncio.run(score_state(environment, problem, state_type(**state)))


async def score_state(environment: Any, problem: dict[str, Any], state: Any) -> Grade:
    """Return the rubric's reward of a rollout's `state`.

    Raises:
        ValueError: a reward function raised.
    """
    try:
        await environment.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
    except RewardFunctionError as error:
        raise ValueError(f"a reward function raised {error}") from error.__cause__
    reward = float(state["reward"])
    metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
    success = reward >= float(problem["success_reward"])
    details = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Grade(reward, "correct" if success else "wrong", details)


def plain_state(state: Any) -> dict[str, Any]:
    """Return the parts of a state that can be sent to another process: plain data, and answers of the model as such."""
    plain = {}
    for key, value in state.items():
        if key in _NOT_SENT:
            continue
        # A part that is something else stays here: a rubric that needs it raises, and says so.
        with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
            plain[key] = msgspec.to_builtins(value, enc_hook=_dump, str_keys=True)
    return plain


def _dump(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no plain data")


_MODEL = "actor"


async def _rollout(base_url: str, api_key: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
    openai = _package("openai")
    # In a thread, because the first call in a process makes the environment.
    environment = await asyncio.to_thread(environment_of, problem["env_id"], problem["env_args"])
    # The endpoint is plain HTTP on loopback: loading certificates for each rollout would be for nothing.
    http_client = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=None, http_client=http_client
    ) as client:
        state = await environment.rollout(problem["row"], client, _MODEL, dict(environment.sampling_args))
    if state["error"] is not None:
        raise state["error"]
    if problem["score_in"] == "worker":
        grade = await score_state(environment, problem, state)
    else:
        timeout_s = float(problem["score_timeout_s"])
        grade = await verify(score_verifiers, "", problem, timeout_s=timeout_s, state=plain_state(state))
    ended = {"success": float(grade.status == "correct"), "overflow": float(bool(state["is_truncated"]))}
    return grade.score, {**grade.details, **ended}


generate_verifiers_rollout = black_box(_rollout)
