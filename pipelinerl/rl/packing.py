"""Which samples share a micro-batch, and which rank gets it. Deterministic, on lists of integers; no torch.

Every sample is in exactly one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.records import Sample

Plan = list[list[list[int]]]

# Length at which causal attention costs as much as the matrix products of a model with 0.5-7 B parameters (rough,
# between 23k and 70k tokens; it only affects how ranks are balanced, never what is computed).
ATTENTION_CROSSOVER_TOKENS = 32768
# With several ranks, groups are split into at least this many units for each, so that ranks can have equal work.
_UNITS_PER_RANK = 8


def sample_cost(length: int) -> float:
    """Relative time of one sequence: linear in its tokens plus the quadratic share of attention."""
    return length * (1.0 + length / ATTENTION_CROSSOVER_TOKENS)


def plan_step(samples: Sequence[Sample], num_ranks: int, config: FinetuneConfig) -> Plan:
    """The plan of a step with these samples; see `make_plan`."""
    lengths = [len(sample.input_ids) for sample in samples]
    prompts = [(sample.group_id, sample.prompt_tokens) for sample in samples] if config.share_prefixes else None
    return make_plan(lengths, num_ranks, config.seq_length, config.seq_packing, config.train_batch_size, prompts)


def expected_computed_tokens(
    prompt: float, answer: float, samples: int, attempts: int, num_ranks: int, seq_length: int
) -> float:
    """Tokens of a sample that go through the layers on average, where prompts of groups are shared.

    Args:
        prompt, answer: tokens of a sample.
        samples, attempts: of a step and of a group.
    """
    length = prompt + answer
    most = seq_length if num_ranks == 1 else min(seq_length, samples * length / (_UNITS_PER_RANK * num_ranks))
    parts = math.ceil(attempts / max(1, most // max(length, 1)))
    return prompt * parts / attempts + answer


def make_plan(
    lengths: Sequence[int],
    num_ranks: int,
    seq_length: int,
    packed: bool,
    rows_per_micro_batch: int = 1,
    prompts: Sequence[tuple[str, int]] | None = None,
) -> Plan:
    """Spread samples over ranks and micro-batches.

    Args:
        lengths: tokens of each sample.
        seq_length: most tokens of one packed row, and of one sample.
        packed: True: a micro-batch is one row of at most `seq_length` tokens. False: at most `rows_per_micro_batch`
            padded rows of similar length.
        prompts: of each sample its group and the tokens of its prompt. Samples of a group share a packed row where
            possible, and their prompt costs once.

    Returns:
        `plan[rank][micro_batch]` = sorted indices into `lengths`. Ranks differ by at most one micro-batch, which the
        trainer fills with a sentinel.

    Raises:
        ValueError: a sample is empty or longer than `seq_length`.
    """
    _check(lengths, seq_length)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if packed:
        cost = _packed_cost(lengths, prompts)
        micro_batches = _pack(order, lengths, num_ranks, seq_length, prompts, cost)
    else:
        micro_batches = _rows(order, num_ranks, rows_per_micro_batch)
        cost = _padded_cost(lengths)
    return _deal(micro_batches, num_ranks, cost)


def _check(lengths: Sequence[int], seq_length: int) -> None:
    for index, length in enumerate(lengths):
        if not 1 <= length <= seq_length:
            raise ValueError(
                f"lengths[{index}]: got {length} tokens, expected 1..{seq_length} (seq_length). "
                "Filter longer samples before packing, or raise finetune.seq_length"
            )


def _pack(
    order: list[int],
    lengths: Sequence[int],
    num_ranks: int,
    capacity: int,
    prompts: Sequence[tuple[str, int]] | None,
    cost: Callable[[list[int]], float],
) -> list[list[int]]:
    """Bins of at most `capacity` tokens, filled evenly: as many as first-fit-decreasing needs, rounded up to a multiple
    of the ranks (which would be idle otherwise). For groups there may be one more for each rank."""
    fewest = _first_fit(order, lengths, capacity)
    count = min(-(-len(fewest) // num_ranks) * num_ranks, len(order))
    if prompts is not None:
        most = capacity if num_ranks == 1 else min(capacity, sum(lengths) // (_UNITS_PER_RANK * num_ranks))
        units = _together(order, lengths, most, prompts)
        for bins in (count, count + num_ranks):
            even = _fill_evenly(units, lengths, bins, capacity, cost)
            if even is not None and all(even):
                return even
    even = _fill_evenly([[index] for index in order], lengths, count, capacity, cost)
    return even if even is not None else fewest


def _together(
    order: list[int], lengths: Sequence[int], most: int, prompts: Sequence[tuple[str, int]]
) -> list[list[int]]:
    """Units of samples that stay together, longest first: groups, or parts of them of at most `most` tokens."""
    members: dict[str, list[int]] = {}
    for index in order:
        members.setdefault(prompts[index][0], []).append(index)
    units: list[list[int]] = []
    for group in members.values():
        used = most
        for index in group:
            if used + lengths[index] > most:
                units.append([])
                used = 0
            units[-1].append(index)
            used += lengths[index]
    return sorted(units, key=lambda unit: -sum(lengths[index] for index in unit))


def _first_fit(order: list[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    used: list[int] = []
    for index in order:
        target = next((b for b, tokens in enumerate(used) if tokens + lengths[index] <= capacity), len(bins))
        if target == len(bins):
            bins.append([])
            used.append(0)
        bins[target].append(index)
        used[target] += lengths[index]
    return bins


def _fill_evenly(
    units: list[list[int]],
    lengths: Sequence[int],
    count: int,
    capacity: int,
    cost: Callable[[list[int]], float],
) -> list[list[int]] | None:
    """Each unit of samples goes into the cheapest bin with room, in halves if there is none; None if a sample does not
    fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    used = [0] * count
    costs = [0.0] * count
    left = units[::-1]
    while left:
        unit = left.pop()
        size = sum(lengths[index] for index in unit)
        room = [b for b in range(count) if used[b] + size <= capacity]
        if not room and len(unit) == 1:
            return None
        if not room:
            left += [unit[len(unit) // 2 :], unit[: len(unit) // 2]]
            continue
        target = min(room, key=lambda b: (costs[b], b))
        bins[target] += unit
        used[target] += size
        costs[target] += cost(unit)
    return bins


def _rows(order: list[int], num_ranks: int, rows: int) -> list[list[int]]:
    """Cut the length-sorted order into even runs of at most `rows`, which minimizes padding."""
    fewest = -(-len(order) // rows)
    count = min(-(-fewest // num_ranks) * num_ranks, len(order))
    cuts = [len(order) * k // count for k in range(count + 1)] if count else []
    return [order[start:end] for start, end in pairwise(cuts)]


def _packed_cost(lengths: Sequence[int], prompts: Sequence[tuple[str, int]] | None) -> Callable[[list[int]], float]:
    """Cost of samples in a row; what the prompts of a group have in common, the shortest at most, costs once."""

    def cost(indices: list[int]) -> float:
        found: dict[str, list[int]] = {}
        for group, tokens in [prompts[index] for index in indices] if prompts is not None else ():
            found.setdefault(group, []).append(tokens)
        again = sum((len(tokens) - 1) * min(tokens) for tokens in found.values())
        return sum(sample_cost(lengths[index]) for index in indices) - again

    return cost


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
