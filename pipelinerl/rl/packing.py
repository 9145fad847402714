"""Which samples share a micro-batch, and which rank gets it. Deterministic, on lists of integers; no torch.

Every sample is in exactly one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.records import Sample
from pipelinerl.world.forecast import SHARED_ROOM

Plan = list[list[list[int]]]

# Length at which causal attention costs as much as the matrix products of a model with 0.5-7 B parameters (rough,
# between 23k and 70k tokens; it only affects how ranks are balanced, never what is computed).
ATTENTION_CROSSOVER_TOKENS = 32768
# With several ranks, groups are split into at least this many units for each, so that ranks can have equal work.
_UNITS_PER_RANK = 8


def sample_cost(length: int) -> float:
    """Relative time of one sequence: linear in its tokens plus the quadratic share of attention."""
    return length * (1.0 + length / ATTENTION_CROSSOVER_TOKENS)


class Groups(NamedTuple):
    """Which samples begin with the same tokens.

    Attributes:
        members: the samples of each group, in an order in which none before a sample has more tokens in common with it
            than its neighbor.
        common: how many that are; by sample.
    """

    members: list[list[int]]
    common: list[int]


def groups_of(samples: Sequence[list[int]], names: Sequence[str]) -> Groups:
    """The groups of these tokens; `names` says of each sample which one it is in.

    The last token of a sample is never in common with another, see `finetune.attention.shared_prefixes`.
    """
    by_name: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        by_name.setdefault(name, []).append(index)
    members = [sorted(indices, key=lambda index: samples[index]) for indices in by_name.values()]
    common = [0] * len(samples)
    for indices in members:
        for before, after in pairwise(indices):
            common[after] = _num_equal(samples[before], samples[after][:-1])
    return Groups(members, common)


def _num_equal(left: list[int], right: list[int]) -> int:
    """Tokens at the start of both."""
    least, most = 0, min(len(left), len(right))
    while least < most:
        middle = (least + most + 1) // 2
        if left[least:middle] == right[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def plan_step(
    samples: Sequence[Sample], num_ranks: int, config: FinetuneConfig, shared_room: float | None = SHARED_ROOM
) -> Plan:
    """The plan of a step with these samples; see `make_plan`.

    Args:
        shared_room: as in `make_plan`; None: the trainer cannot share, whatever `finetune.share_prefixes` says.
    """
    tokens = [sample.input_ids for sample in samples]
    shares = config.seq_packing and config.share_prefixes and shared_room is not None
    groups = groups_of(tokens, [sample.group_id for sample in samples]) if shares else None
    lengths, rows, room = list(map(len, tokens)), config.train_batch_size, shared_room or SHARED_ROOM
    return make_plan(lengths, num_ranks, config.seq_length, config.seq_packing, rows, groups, room)


def expected_computed_tokens(
    prompt: float,
    answer: float,
    samples: int,
    attempts: int,
    num_ranks: int,
    seq_length: int,
    shared_room: float = SHARED_ROOM,
) -> float:
    """Tokens of a sample that go through the layers on average, where prompts of groups are shared.

    Args:
        prompt, answer: tokens of a sample.
        samples, attempts: of a step and of a group.
    """
    most = 1 + (seq_length - prompt - answer) // max(shared_room * prompt + answer, 1)
    if num_ranks > 1:
        most = min(most, samples // (_UNITS_PER_RANK * num_ranks))
    return prompt * math.ceil(attempts / max(1, most)) / attempts + answer


def make_plan(
    lengths: Sequence[int],
    num_ranks: int,
    seq_length: int,
    packed: bool,
    rows_per_micro_batch: int = 1,
    groups: Groups | None = None,
    shared_room: float = SHARED_ROOM,
) -> Plan:
    """Spread samples over ranks and micro-batches.

    Args:
        lengths: tokens of each sample.
        seq_length: most tokens of one packed row, and of one sample.
        packed: True: a micro-batch is one row of at most `seq_length` tokens. False: at most `rows_per_micro_batch`
            padded rows of similar length.
        groups: samples of a group share a packed row where possible, and what they have in common costs once.
        shared_room: fraction of a token's room that a shared token takes in every further sample.

    Returns:
        `plan[rank][micro_batch]` = sorted indices into `lengths`. Ranks differ by at most one micro-batch, which the
        trainer fills with a sentinel.

    Raises:
        ValueError: a sample is empty or longer than `seq_length`.
    """
    _check(lengths, seq_length)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if packed:
        rows = _Rows(lengths, groups, shared_room)
        return _deal(_pack(order, rows, num_ranks, seq_length), num_ranks, rows.cost)
    return _deal(_padded(order, num_ranks, rows_per_micro_batch), num_ranks, _padded_cost(lengths))


def _check(lengths: Sequence[int], seq_length: int) -> None:
    for index, length in enumerate(lengths):
        if not 1 <= length <= seq_length:
            raise ValueError(
                f"lengths[{index}]: got {length} tokens, expected 1..{seq_length} (seq_length). "
                "Filter longer samples before packing, or raise finetune.seq_length"
            )


class _Rows:
    """What samples take of a packed row."""

    def __init__(self, lengths: Sequence[int], groups: Groups | None, shared_room: float) -> None:
        self._lengths = lengths
        self._shared_room = shared_room
        self.groups = groups
        members = [] if groups is None else groups.members
        self._place = {index: (group, at) for group, indices in enumerate(members) for at, index in enumerate(indices)}

    def common(self, indices: list[int]) -> int:
        """Tokens that each has in common with the one before it of its group, summed."""
        if self.groups is None:
            return 0
        total = 0
        for before, after in pairwise(sorted(indices, key=lambda index: self._place[index])):
            (group, start), (other, end) = self._place[before], self._place[after]
            if group == other:
                # Those between them may be in another row.
                total += min(self.groups.common[index] for index in self.groups.members[group][start + 1 : end + 1])
        return total

    def room(self, indices: list[int]) -> float:
        """Room taken of `seq_length`, in tokens."""
        return sum(self._lengths[index] for index in indices) - (1 - self._shared_room) * self.common(indices)

    def cost(self, indices: list[int]) -> float:
        """Relative time."""
        return sum(sample_cost(self._lengths[index]) for index in indices) - self.common(indices)

    def parts(self, capacity: int, num_ranks: int) -> Iterator[list[int]]:
        """The groups, in parts that fit into a row and, with several ranks, can be spread evenly."""
        most = sum(self._lengths) / (_UNITS_PER_RANK * num_ranks) if num_ranks > 1 else math.inf
        for group in [] if self.groups is None else self.groups.members:
            part: list[int] = []
            for index in group:
                longer = [*part, index]
                if part and (self.room(longer) > capacity or sum(self._lengths[each] for each in longer) > most):
                    yield part
                    part = []
                part.append(index)
            yield part


def _pack(order: list[int], rows: _Rows, num_ranks: int, capacity: int) -> list[list[int]]:
    """Bins with room for `capacity` tokens, filled evenly: as many as first-fit-decreasing needs, rounded up to a
    multiple of the ranks (which would be idle otherwise). For groups there may be one more for each rank."""
    units, further = [[index] for index in order], 0
    if rows.groups is not None:
        units, further = sorted(rows.parts(capacity, num_ranks), key=lambda unit: (-rows.room(unit), unit)), num_ranks
    fewest = _first_fit(units, rows, capacity)
    count = min(-(-len(fewest) // num_ranks) * num_ranks, len(order))
    for bins in (count, count + further):
        even = _fill_evenly(units, rows, bins, capacity)
        if even is not None and all(even):
            return even
    return fewest


def _first_fit(units: list[list[int]], rows: _Rows, capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    used: list[float] = []
    for unit in units:
        room = rows.room(unit)
        target = next((b for b, taken in enumerate(used) if taken + room <= capacity), len(bins))
        if target == len(bins):
            bins.append([])
            used.append(0.0)
        bins[target] += unit
        used[target] += room
    return bins


def _fill_evenly(units: list[list[int]], rows: _Rows, count: int, capacity: int) -> list[list[int]] | None:
    """Each unit of samples goes into the cheapest bin with room, in halves if there is none; None if a sample does not
    fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    used = [0.0] * count
    costs = [0.0] * count
    left = units[::-1]
    while left:
        unit = left.pop()
        room = rows.room(unit)
        possible = [b for b in range(count) if used[b] + room <= capacity]
        if not possible and len(unit) == 1:
            return None
        if not possible:
            left += [unit[len(unit) // 2 :], unit[: len(unit) // 2]]
            continue
        target = min(possible, key=lambda b: (costs[b], b))
        bins[target] += unit
        used[target] += room
        costs[target] += rows.cost(unit)
    return bins


def _padded(order: list[int], num_ranks: int, rows: int) -> list[list[int]]:
    """Cut the length-sorted order into even runs of at most `rows`, which minimizes padding."""
    fewest = -(-len(order) // rows)
    count = min(-(-fewest // num_ranks) * num_ranks, len(order))
    cuts = [len(order) * k // count for k in range(count + 1)] if count else []
    return [order[start:end] for start, end in pairwise(cuts)]


def _padded_cost(lengths: Sequence[int]) -> Callable[[list[int]], float]:
    return lambda indices: len(indices) * sample_cost(max(lengths[index] for index in indices))


def _deal(micro_batches: list[list[int]], num_ranks: int, cost: Callable[[list[int]], float]) -> Plan:
    """Assign micro-batches, most expensive first, to the rank with the least work; ranks differ by at most one."""
    costs = {position: cost(indices) for position, indices in enumerate(micro_batches)}
    plan: Plan = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    share = -(-len(micro_batches) // num_ranks)
    full_ranks = len(micro_batches) - (share - 1) * num_ranks if micro_batches else num_ranks
    for position in sorted(costs, key=lambda p: (-costs[p], p)):
        at_share = sum(len(assigned) == share for assigned in plan)
        limit = share if at_share < full_ranks else share - 1
        rank = min((r for r in range(num_ranks) if len(plan[r]) < limit), key=lambda r: (load[r], r))
        plan[rank].append(sorted(micro_batches[position]))
        load[rank] += costs[position]
    return plan
