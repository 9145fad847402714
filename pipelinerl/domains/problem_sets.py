"""Loads the problems of a run through the user's dataset loader, and checks that they are what a run needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.domains.registry import LOADER_KEY, DatasetLoader, load_dataset_loader
from pipelinerl.errors import DomainError, UserError


class Problem(msgspec.Struct, frozen=True):
    """One problem: the user's dict, with an id that stays the same from run to run.

    `share` is how much of training the problems of its `domain` are to have; None: as much as their number.
    """

    id: str
    dataset_name: str
    data: dict[str, Any]
    domain: str = ""
    share: float | None = None


@dataclass(frozen=True)
class ProblemSets:
    """Training problems (at least one) and held-out problems (may be none, if no test data set is named)."""

    train: list[Problem]
    test: list[Problem]


def load_problem_sets(config: RunConfig) -> ProblemSets:
    """Load `train_dataset_names` and `test_dataset_names`.

    Raises:
        DomainError: the loader fails, returns something else than a list of dicts of plain data, or returns no problem.
    """
    loader = load_dataset_loader(config)
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
    test = []
    if config.test_dataset_names:
        test = _load(loader, config, "test_dataset_names", config.test_dataset_names)
        if not test:
            raise DomainError(
                f"{LOADER_KEY}: {config.dataset_loader!r} returned no problem for "
                f"test_dataset_names={config.test_dataset_names}, expected at least one. "
                "Check these names, or set test_dataset_names=[] to train without evaluation."
            )
    return ProblemSets(train=train, test=test)


def _load(loader: DatasetLoader, config: RunConfig, key: str, names: list[Any]) -> list[Problem]:
    where = f"{LOADER_KEY}: {config.dataset_loader!r} called with {key}={names}"
    try:
        rows = loader(list(names), **config.dataset_loader_params)
    except UserError:
        raise
    except Exception as error:
        raise DomainError(f"{where} raised {type(error).__name__}: {error}") from error
    if not hasattr(rows, "__iter__") or isinstance(rows, str | bytes | dict):
        raise DomainError(f"{where} returned a {type(rows).__name__}, expected a list of dicts.")
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    return [_problem(row, index, names, where, encoder) for index, row in enumerate(rows)]


def _problem(row: Any, index: int, names: list[Any], where: str, encoder: msgspec.msgpack.Encoder) -> Problem:
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
    name = row.get("dataset", names[0] if len(names) == 1 and isinstance(names[0], str) else "default")
    digest = hashlib.blake2b(content, digest_size=8).hexdigest
    share = row.get("share")
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not share > 0):
        raise DomainError(
            f"{where}: problem {index} has share {share!r}, expected a number above 0. Change or drop it."
        )
    return Problem(
        id=str(own_id) if own_id is not None else digest(),
        dataset_name=str(name),
        data=row,
        domain=str(row.get("domain", "")),
        share=share,
    )
