"""A user's task: its functions, found by the dotted paths in the configuration, and its problems, loaded by them.

Functions are checked before they are called, and so is what the loader returns.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sysconfig
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from pipelinerl.config import RunConfig
from pipelinerl.errors import DomainError, UserError

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


class Problem(msgspec.Struct, frozen=True):
    """One problem: the user's dict, with an id that stays the same from run to run.

    `share` is how much of training the problems of its `domain` are to have; None: as much as their number.
    `evaluation_set` says how a held-out problem is sampled (`RunConfig.evaluation_parameters`).
    """

    id: str
    dataset_name: str
    data: dict[str, Any]
    domain: str = ""
    share: float | None = None
    evaluation_set: int = 0


@dataclass(frozen=True)
class ProblemSets:
    """Training problems (at least one) and held-out problems (may be none, if no test data set is named)."""

    train: list[Problem]
    test: list[Problem]


def load_problem_sets(config: RunConfig) -> ProblemSets:
    """Load `train_dataset_names`, `test_dataset_names` and the sets of `eval`; without a trainer only the latter two.

    Held-out problems of one data set with the same id get ids of their own: they are not samples of one problem.

    Raises:
        DomainError: the loader fails, returns something else than a list of dicts of plain data, or returns no problem;
            or two sets of `eval` have problems of one data set, whose results would be mixed.
    """
    loader = load_dataset_loader(config)
    train = [] if config.debug.mode == "evaluation" else _load_training(loader, config)
    test = _load_held_out(loader, config, "test_dataset_names", config.plain_test_names)
    for index, own in enumerate(config.eval):
        loaded = _load_held_out(loader, config, f"eval.{index}.name", [own.name])
        both = {problem.dataset_name for problem in loaded} & {problem.dataset_name for problem in test}
        if both:
            raise DomainError(
                f"eval.{index}.name={own.name!r} has problems of the data set {min(both)!r}, and so has a held-out set "
                "before it, but results are grouped by data set. Give one of them another name: in a built-in domain "
                "{path: ..., name: ...}, else `dataset` of its problems."
            )
        test += [msgspec.structs.replace(problem, evaluation_set=index + 1) for problem in loaded]
    return ProblemSets(train=train, test=_with_own_ids(test))


def _with_own_ids(problems: list[Problem]) -> list[Problem]:
    seen: Counter[tuple[str, str]] = Counter()
    own: list[Problem] = []
    for each in problems:
        seen[each.dataset_name, each.id] += 1
        number = seen[each.dataset_name, each.id]
        own.append(each if number == 1 else msgspec.structs.replace(each, id=f"{each.id}.{number}"))
    return own


def _load_training(loader: DatasetLoader, config: RunConfig) -> list[Problem]:
    train = _load(loader, config, "train_dataset_names", config.train_dataset_names)
    subset = config.train_subset
    if subset is not None:
        train = train[subset.get("begin", 0) : subset.get("end", len(train))]
    if not train:
        after = f" after train_subset={subset}" if subset is not None else ""
        raise DomainError(
            f"{LOADER_KEY}: {config.dataset_loader!r} returned no training problem for "
            f"train_dataset_names={config.train_dataset_names}{after}, expected at least one. Check these names."
        )
    return train


def _load_held_out(loader: DatasetLoader, config: RunConfig, key: str, names: list[Any]) -> list[Problem]:
    test = _load(loader, config, key, names) if names else []
    if names and not test:
        raise DomainError(
            f"{LOADER_KEY}: {config.dataset_loader!r} returned no problem for {key}={names}, expected at least one. "
            "Check these names, or leave them out (test_dataset_names=[]) to train without evaluation."
        )
    return test


def _load(loader: DatasetLoader, config: RunConfig, key: str, names: list[Any]) -> list[Problem]:
    where = f"{LOADER_KEY}: {config.dataset_loader!r} called with {key}={names}"
    try:
        rows = loader(list(names), **config.dataset_loader_params)
    except UserError:
        raise
    except Exception as error:
        raise DomainError(f"{where} raised {describe_error(error)}") from error
    if not hasattr(rows, "__iter__") or isinstance(rows, str | bytes | dict):
        raise DomainError(f"{where} returned a {type(rows).__name__}, expected a list of dicts.")
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    # A set of `eval` is a data set of its own, also if its name is not a text.
    default = key.removesuffix(".name") if key.startswith("eval.") else "default"
    default = names[0] if len(names) == 1 and isinstance(names[0], str) else default
    return [_problem(row, index, default, where, encoder) for index, row in enumerate(rows)]


def _problem(row: Any, index: int, dataset: str, where: str, encoder: msgspec.msgpack.Encoder) -> Problem:
    if not isinstance(row, dict):
        raise DomainError(f"{where}: problem {index} is a {type(row).__name__}, expected a dict.")
    try:
        content = encoder.encode(row)
    except (TypeError, ValueError, OverflowError) as error:
        raise DomainError(
            f"{where}: problem {index} cannot be sent to a rollout worker: {error}. Expected plain data (text, numbers "
            "of at most 64 bits, lists, dicts); convert other values, for instance with str() or .tolist()."
        ) from error
    own_id = row.get("id")
    digest = hashlib.blake2b(content, digest_size=8).hexdigest
    share = row.get("share")
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not share > 0):
        raise DomainError(
            f"{where}: problem {index} has share {share!r}, expected a number above 0. Change or drop it."
        )
    return Problem(
        id=str(own_id) if own_id is not None else digest(),
        dataset_name=str(row.get("dataset", dataset)),
        data=row,
        domain=str(row.get("domain", "")),
        share=share,
    )


_NOT_CONTENT = ("id", "dataset", "domain", "share")


def shared_problems(problems: ProblemSets) -> int:
    """Return how many held-out problems are training problems too, whatever else is said of them than their content."""

    def contents(of: list[Problem]) -> list[bytes]:
        own = ({key: value for key, value in each.data.items() if key not in _NOT_CONTENT} for each in of)
        return [hashlib.blake2b(encoder.encode(data), digest_size=16).digest() for data in own]

    encoder = msgspec.msgpack.Encoder(order="deterministic")
    seen = set(contents(problems.train))
    return sum(content in seen for content in contents(problems.test))
