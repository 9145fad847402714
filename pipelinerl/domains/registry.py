"""Finds the user's functions by the dotted paths in the configuration, and checks their shape before they are used."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError

LOADER_KEY = "dataset_loader"
ROLLOUT_KEY = "actor.rollout_policy"
_LOADER_SHAPE = "def load_problems(dataset_names: list[str], **params) -> list[dict]"
_ROLLOUT_SHAPE = "async def generate_rollout(cfg, llm, problem, session) -> RolloutResult"

DatasetLoader = Callable[..., list[dict[str, Any]]]
RolloutFunction = Callable[[Any, Any, dict[str, Any], Any], Awaitable[Any]]


def load_dataset_loader(config: RunConfig) -> DatasetLoader:
    """Return the function of `dataset_loader`, checked to take the names and `dataset_loader_params`."""
    loader = _resolve(config.dataset_loader, LOADER_KEY, _LOADER_SHAPE)
    where = _where(loader, LOADER_KEY, config.dataset_loader)
    if inspect.iscoroutinefunction(loader):
        raise DomainError(f"{where} is async, expected a plain function: {_LOADER_SHAPE}. Remove `async`.")
    _check_call(loader, where, _LOADER_SHAPE, ([],), config.dataset_loader_params)
    return loader


def load_rollout_function(config: RunConfig) -> RolloutFunction:
    """Return the function of `actor.rollout_policy`, checked to be async and to take four arguments."""
    path = config.actor.rollout_policy
    function = _resolve(path, ROLLOUT_KEY, _ROLLOUT_SHAPE)
    where = _where(function, ROLLOUT_KEY, path)
    call = function if inspect.isfunction(function) else getattr(function, "func", type(function).__call__)
    if not inspect.iscoroutinefunction(call):
        raise DomainError(f"{where} is not async, expected {_ROLLOUT_SHAPE}. Write `async def`.")
    _check_call(function, where, _ROLLOUT_SHAPE, (None, None, {}, None), {})
    # A rollout function may have needs of its own, such as another file of the user.
    check = getattr(function, "check_config", None)
    if check is not None:
        check(config)
    return function


def _resolve(path: str | None, key: str, shape: str) -> Callable[..., Any]:
    if not path:
        raise DomainError(f"{key} is not set, expected the dotted path of a function: {shape}. Set {key}=my_task.name.")
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise DomainError(
            f"{key}: got {path!r}, expected module and function with a dot between them, for instance my_task.{path}. "
            "A file next to the configuration (the folder of --config-dir) is found by its name."
        )
    target: Callable[..., Any] | None = getattr(_import(module_name, path, key), name, None)
    if target is None:
        module = importlib.import_module(module_name)
        # The public functions that the key could mean: loaders are plain, rollout functions async.
        known = [
            each
            for each, value in vars(module).items()
            if inspect.isroutine(value) and inspect.iscoroutinefunction(value) == (key == ROLLOUT_KEY)
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {module_name}.{near[0]}?" if near else f"Define {name} there, or change {key}."
        raise DomainError(
            f"{key}: {path!r}: {module.__file__ or module.__name__} has no {name!r}, expected {shape}. {hint}"
        )
    if not callable(target):
        raise DomainError(f"{key}: {path!r} is a {type(target).__name__}, expected a function: {shape}.")
    return target


def _import(module_name: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise DomainError(
                f"{key}: {path!r}: there is no module {missing!r}. Expected a file {missing.replace('.', '/')}.py next "
                "to your configuration (the folder of --config-dir), in an installed package or on PYTHONPATH."
            ) from error
        raise DomainError(
            f"{key}: {path!r}: importing {module_name} failed{_line_of(error)}: it needs the module {missing!r}, which "
            "is not installed. Install it, or remove that import."
        ) from error
    except SystemExit as error:
        raise DomainError(
            f"{key}: {path!r}: importing {module_name} ends the process{_top_line_of(error)}: the file calls "
            'sys.exit(). Move that below `if __name__ == "__main__":`.'
        ) from error
    except Exception as error:
        raise DomainError(
            f"{key}: {path!r}: importing {module_name} failed{_line_of(error)}: {type(error).__name__}: {error}. "
            "Fix the file."
        ) from error


def _check_call(
    function: Callable[..., Any], where: str, shape: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Check that `function` can be called with these arguments, without calling it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        extra = f" with dataset_loader_params {sorted(kwargs)}" if kwargs else ""
        raise DomainError(
            f"{where} has the signature {signature}, expected {shape}: it cannot be called{extra} ({error}). "
            "Change its parameters."
        ) from error


def _where(function: Any, key: str, path: str | None) -> str:
    return f"{key}: {path!r}{where_is(function)}"


def where_is(function: Any) -> str:
    """Return ` (file:line)` of a function, or nothing."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def _top_line_of(error: BaseException) -> str:
    """Return ` (file:line)` of the line at the top of a file that led to `error`; libraries may replace `sys.exit`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _line_of(error: BaseException) -> str:
    """Return ` (file:line)` of the user's line that raised, or nothing."""
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f" ({error.filename}:{error.lineno})"
    return f" ({place})" if (place := place_of(error)) else ""


#: Code that is not the user's own: this package, Python's library and installed packages.
FOREIGN = (
    *("<", f"{Path(__file__).parents[1]}/"),
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def place_of(error: BaseException) -> str:
    """Return `file:line` of the user's own line that led to `error`; empty: no such line did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(FOREIGN)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def describe_error(error: BaseException, function: Any = None) -> str:
    """Say in one line what user code raised, and at which of its lines.

    Args:
        error: of user code, or of a check of what it returned.
        function: the user's; named where no line of the user's led to the error.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - user code
        text = "(without a text)"
    if isinstance(error, ValidationError):
        text = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}, got {fault['input']!r:.80}"
            for fault in error.errors(include_url=False)
        )
    if is_await_missing(error):
        text += ". Is an `await` missing there?"
    return f"{type(error).__name__}: {text}{_line_of(error) or (where_is(function) if function is not None else '')}"


def is_await_missing(error: BaseException) -> bool:
    """Whether `error` is that of a coroutine that was used as if it were its result."""
    return isinstance(error, AttributeError | TypeError) and "coroutine" in str(error)


def gold_score(validate: Callable[..., float | None], problem: dict[str, Any], config: Any) -> float | None:
    """Return the score of the problem's gold answer; None: it has none.

    Args:
        validate: `validate(problem)`, or `validate(problem, config)`; the second parameter goes by its name.
        problem: as the loader gave it.
        config: of the run, as `generate_rollout` gets it.
    """
    if "config" in inspect.signature(validate).parameters:
        return validate(problem, config=config)
    return validate(problem)
