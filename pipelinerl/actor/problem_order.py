"""The order of a run's problems, and the seeds of their rollouts. Both follow from the seed of the run."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pipelinerl.config.task import EvaluationSet
from pipelinerl.domains.user_task import Problem


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
