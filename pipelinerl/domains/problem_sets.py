"""The problems of a run: loaded through the user's dataset loader, checked, and put in order.

The same run seed gives the same order and the same seeds of rollouts.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.config.task import EvaluationSet
from pipelinerl.domains.registry import LOADER_KEY, DatasetLoader, describe_error, load_dataset_loader
from pipelinerl.errors import DomainError, UserError


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


class ProblemOrder:
    """An endless sequence of problems; every pass over all of them is shuffled anew.

    If all problems name the share of their domain, each domain has passes of its own, and domains alternate by their
    shares, whatever the numbers of their problems.

    Args:
        problems: at least one.
        seed: determines the order.
    """

    def __init__(self, problems: list[Problem], seed: str) -> None:
        self._problems = problems
        self._seed = seed
        self._epoch = -1
        self._order: list[Problem] = []
        shares = {problem.domain: problem.share for problem in problems if problem.share is not None}
        self._domains: dict[str, ProblemOrder] = {}
        if len(shares) > 1 and all(problem.share is not None for problem in problems):
            self._mix = DomainMix(shares)
            for domain in shares:
                own = [msgspec.structs.replace(each, share=None) for each in problems if each.domain == domain]
                self._domains[domain] = ProblemOrder(own, f"{seed}/{domain}")

    def __getitem__(self, number: int) -> Problem:
        """Problem number `number`, from 0. Cheap while the pass stays the same."""
        if self._domains:
            domain, own_number = self._mix[number]
            return self._domains[domain][own_number]
        epoch, place = divmod(number, len(self._problems))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._problems)
            random.Random(f"order/{self._seed}/{epoch}").shuffle(self._order)
        return self._order[place]


class DomainMix:
    """An endless sequence of domains in which each has its share, within one problem.

    Args:
        shares: weights by domain; they need not add up to 1.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = math.fsum(shares.values())
        self._shares = {name: share / total for name, share in shares.items()}
        self._counts = dict.fromkeys(shares, 0)
        self._sequence: list[tuple[str, int]] = []

    def __getitem__(self, number: int) -> tuple[str, int]:
        """Return the domain of problem `number`, from 0, and how often it came before."""
        while len(self._sequence) <= number:
            count = len(self._sequence) + 1
            # The domain that lacks most of its share of `count` problems.
            name = max(self._shares, key=lambda each: self._shares[each] * count - self._counts[each])
            self._sequence.append((name, self._counts[name]))
            self._counts[name] += 1
        return self._sequence[number]


class EpochCounter:
    """Counts passes over the problems. Only leading places whose groups have all ended count: a slow one is waited for.

    Args:
        num_problems: places of one pass.
    """

    def __init__(self, num_problems: int) -> None:
        self._num_problems = num_problems
        self._leading = 0
        self._ahead: set[int] = set()

    @property
    def epochs_done(self) -> float:
        """Finished passes; 1.5 is the first one and half of the second."""
        return self._leading / self._num_problems

    def resume(self, numbers_due: Iterable[int], next_number: int) -> None:
        """Continue an earlier run: all places below `next_number` have ended, except `numbers_due`."""
        due = set(numbers_due)
        self._leading = min(due, default=next_number)
        self._ahead = set(range(self._leading, next_number)) - due

    def end(self, number: int) -> None:
        """Note that the group at place `number` ended, with whatever result."""
        self._ahead.add(number)
        while self._leading in self._ahead:
            self._ahead.remove(self._leading)
            self._leading += 1


def evaluation_problems(
    problems: list[Problem], num_rollouts: int | None, seed: str, sets: Sequence[EvaluationSet] = ()
) -> list[Problem]:
    """Return the problems of one evaluation, one for each rollout, the same for every evaluation of a run.

    Args:
        problems: the held-out problems.
        num_rollouts: how many to return of sets without sampling of their own. More than there are problems means
            several rollouts per problem; None means one each.
        seed: determines which ones, if there are more problems than rollouts.
        sets: those with sampling of their own (`eval`): `k` places for each problem, one after another.
    """
    places = _some_of([problem for problem in problems if not problem.evaluation_set], num_rollouts, seed)
    for index, own in enumerate(sets, start=1):
        of_set = [problem for problem in problems if problem.evaluation_set == index]
        count = None if own.problems is None else min(own.problems, len(of_set))
        places += [problem for problem in _some_of(of_set, count, seed) for _ in range(own.k)]
    return places


def _some_of(problems: list[Problem], count: int | None, seed: str) -> list[Problem]:
    """Return `count` of `problems`, in the order of the seed and more than once if there are fewer; None: all."""
    if count is None or not problems:
        return list(problems)
    shuffled = list(problems)
    random.Random(f"evaluation/{seed}").shuffle(shuffled)
    repeats = -(-count // len(shuffled))
    return (shuffled * repeats)[:count]


def sample_seeds(seed: int, places: Sequence[Problem]) -> list[int]:
    """Return the seed of each rollout of an evaluation. It depends on the data set, the problem and which of its
    samples this is: with the same weights, fewer samples or sets are a part of more.
    """
    seen: Counter[tuple[str, str]] = Counter()
    seeds = []
    for each in places:
        seeds.append(rollout_seed(seed, "evaluation", each.dataset_name, each.id, seen[each.dataset_name, each.id]))
        seen[each.dataset_name, each.id] += 1
    return seeds


def rollout_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2^63) that depends on `parts` (run seed, purpose, group, attempt) and nothing else."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
