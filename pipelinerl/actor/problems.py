"""The order in which problems are attempted, and the seeds of their rollouts. Pure; waits for nothing.

Called by the actor for every new group and for evaluations. The same seed gives the same order and the same seeds.
"""

from __future__ import annotations

import hashlib
import random

import msgspec

from pipelinerl.actor.turns import Turns
from pipelinerl.domains.problem_sets import Problem


class ProblemOrder:
    """Problems without end, every pass over all of them in another shuffled order. A restart goes on in the same order.

    Where all problems name the share of their domain, each domain has passes of its own, and domains take turns by
    their shares, whatever the numbers of their problems.

    Args:
        problems: at least one.
        seed: decides the order.
    """

    def __init__(self, problems: list[Problem], seed: str) -> None:
        self._problems = problems
        self._seed = seed
        self._epoch = -1
        self._order: list[Problem] = []
        shares = {problem.domain: problem.share for problem in problems if problem.share is not None}
        self._domains: dict[str, ProblemOrder] = {}
        if len(shares) > 1 and all(problem.share is not None for problem in problems):
            self._turns = Turns(shares)
            for domain in shares:
                own = [msgspec.structs.replace(each, share=None) for each in problems if each.domain == domain]
                self._domains[domain] = ProblemOrder(own, f"{seed}/{domain}")

    def __getitem__(self, number: int) -> Problem:
        """Problem number `number` from 0. Cheap as long as the pass stays the same."""
        if self._domains:
            domain, own_number = self._turns[number]
            return self._domains[domain][own_number]
        epoch, place = divmod(number, len(self._problems))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._problems)
            random.Random(f"order/{self._seed}/{epoch}").shuffle(self._order)
        return self._order[place]


def evaluation_problems(problems: list[Problem], num_rollouts: int | None, seed: str) -> list[Problem]:
    """Return the problems of one evaluation, the same for every evaluation of a run.

    Args:
        problems: the held-out problems.
        num_rollouts: how many to return; more than there are problems means several rollouts a problem; None: one each.
        seed: decides which ones, when there are more problems than rollouts.
    """
    if num_rollouts is None or not problems:
        return list(problems)
    shuffled = list(problems)
    random.Random(f"evaluation/{seed}").shuffle(shuffled)
    rounds = -(-num_rollouts // len(shuffled))
    return (shuffled * rounds)[:num_rollouts]


def rollout_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2^63) that depends on all parts (run seed, purpose, group, attempt) and nothing else."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
