"""`make_plan`: every sample once, nothing over its capacity, ranks balanced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.rl.packing import make_plan, sample_cost

cases = st.tuples(
    st.lists(st.integers(1, 64), min_size=0, max_size=60), st.integers(1, 5), st.integers(64, 200), st.integers(1, 6)
)


@settings(max_examples=200, deadline=None)
@given(cases, st.booleans(), st.integers(0, 7))
def test_m5_every_sample_once_and_within_capacity(case, packed, group):
    lengths, ranks, seq_length, rows = case
    groups = [str(index // group) for index in range(len(lengths))] if group else None
    plan = make_plan(lengths, ranks, seq_length, packed, rows, groups)
    assert len(plan) == ranks
    assert sorted(i for rank in plan for mb in rank for i in mb) == list(range(len(lengths)))
    assert all(mb for rank in plan for mb in rank), "no empty micro-batch"
    counts = [len(rank) for rank in plan]
    assert max(counts) - min(counts) <= 1
    for micro_batch in (mb for rank in plan for mb in rank):
        if packed:
            assert sum(lengths[i] for i in micro_batch) <= seq_length
        else:
            assert len(micro_batch) <= rows
    assert plan == make_plan(list(lengths), ranks, seq_length, packed, rows, groups), "deterministic"
    if packed:
        apart = make_plan(lengths, ranks, seq_length, packed)
        assert max(map(len, plan)) <= max(map(len, apart)), "more micro-batches than without groups"


def test_packs_into_the_fewest_rows():
    # 6+4 and 5+5 fill two rows of 10 exactly.
    assert make_plan([6, 5, 5, 4], 1, 10, True) == [[[0, 3], [1, 2]]]


def test_ranks_get_equal_work():
    # One row of 100 would hold all; two ranks share it instead: 40+10 and 30+20.
    assert sorted(make_plan([40, 30, 20, 10], 2, 100, True)) == [[[0, 3]], [[1, 2]]]


def test_groups_stay_together():
    lengths = [20, 25, 20, 25, 20, 25]
    assert make_plan(lengths, 1, 100, True, groups=[*"ababab"]) == [[[1, 3, 5], [0, 2, 4]]]
    assert make_plan(lengths, 1, 100, True) == [[[1, 4, 5], [0, 2, 3]]]


def test_groups_are_split_between_ranks_where_these_would_be_unequal():
    """Two groups of 16 on 4 ranks: parts of 2, so that each has 8."""
    plan = make_plan([10] * 32, 4, 1000, True, groups=["a"] * 16 + ["b"] * 16)
    assert [[len(row) for row in rank] for rank in plan] == [[8]] * 4


def test_a_group_that_fits_no_row_is_halved():
    plan = make_plan([10] * 8, 1, 40, True, groups=["a"] * 8)
    assert sorted(plan[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_padded_rows_hold_similar_lengths():
    assert make_plan([10, 1, 9, 2], 1, 64, False, rows_per_micro_batch=2) == [[[0, 2], [1, 3]]]


def test_fewer_samples_than_ranks_leaves_ranks_empty():
    assert sorted(map(len, make_plan([3, 3], 4, 8, True))) == [0, 0, 1, 1]


def test_long_samples_are_spread_over_ranks():
    lengths = [1000] * 4 + [10] * 100
    plan = make_plan(lengths, 4, 1000, True)
    costs = [sum(sample_cost(lengths[i]) for mb in rank for i in mb) for rank in plan]
    assert max(costs) / min(costs) < 1.05


@pytest.mark.parametrize(("lengths", "text"), [([5, 11], r"lengths\[1\]: got 11"), ([0], r"lengths\[0\]: got 0")])
def test_unpackable_sample_is_the_callers_error(lengths, text):
    with pytest.raises(ValueError, match=text):
        make_plan(lengths, 1, 10, True)
