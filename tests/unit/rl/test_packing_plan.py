"""`make_plan`: every sample once, nothing over its capacity, ranks balanced."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.rl.packing import expected_computed_tokens, make_plan, sample_cost

cases = st.tuples(
    st.lists(st.integers(1, 64), min_size=0, max_size=60), st.integers(1, 5), st.integers(64, 200), st.integers(1, 6)
)


@settings(max_examples=200, deadline=None)
@given(cases, st.booleans(), st.integers(0, 7))
def test_m5_every_sample_once_and_within_capacity(case, packed, group):
    lengths, ranks, seq_length, rows = case
    prompts = [(str(index // group), min(lengths) // 2) for index in range(len(lengths))] if group else None
    plan = make_plan(lengths, ranks, seq_length, packed, rows, prompts)
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
    assert plan == make_plan(list(lengths), ranks, seq_length, packed, rows, prompts), "deterministic"
    if packed:
        apart = make_plan(lengths, ranks, seq_length, packed)
        assert max(map(len, plan)) <= max(map(len, apart)) + 1, "at most one more micro-batch for groups"


def test_packs_into_the_fewest_rows():
    # 6+4 and 5+5 fill two rows of 10 exactly.
    assert make_plan([6, 5, 5, 4], 1, 10, True) == [[[0, 3], [1, 2]]]


def test_ranks_get_equal_work():
    # One row of 100 would hold all; two ranks share it instead: 40+10 and 30+20.
    assert sorted(make_plan([40, 30, 20, 10], 2, 100, True)) == [[[0, 3]], [[1, 2]]]


def test_groups_stay_together():
    lengths, prompts = [20, 25, 20, 25, 20, 25], [("a", 5), ("b", 5)] * 3
    assert make_plan(lengths, 1, 100, True, prompts=prompts) == [[[1, 3, 5], [0, 2, 4]]]
    assert make_plan(lengths, 1, 100, True) == [[[1, 4, 5], [0, 2, 3]]]


def test_groups_are_split_between_ranks():
    """Two groups of 16 on 4 ranks: each rank has 8 samples."""
    plan = make_plan([10] * 32, 4, 1000, True, prompts=[("a", 5)] * 16 + [("b", 5)] * 16)
    assert [[len(row) for row in rank] for rank in plan] == [[8]] * 4


def test_a_group_that_fits_no_row_is_split():
    plan = make_plan([10] * 8, 1, 40, True, prompts=[("a", 5)] * 8)
    assert sorted(plan[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def computed(plan, lengths, prompts):
    """Tokens of each rank that go through the layers."""
    found = []
    for rank in plan:
        rows = [{prompts[index] for index in row} for row in rank]
        answers = sum(lengths[index] - prompts[index][1] for row in rank for index in row)
        found.append(answers + sum(tokens for row in rows for _, tokens in row))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("groups", "samples", "prompt", "seq_length"),
    [(64, 8, 130, 12000), (32, 16, 500, 4096), (64, 8, 1000, 12000), (4, 64, 600, 16000)],
)
def test_prompts_are_rarely_computed_again_and_ranks_have_equal_work(groups, samples, prompt, seq_length, ranks):
    """Also where rows are nearly full without groups."""
    draw = random.Random(groups)
    prompts = [(str(group), prompt) for group in range(groups) for _ in range(samples)]
    lengths = [prompt + draw.randrange(50, 150) for _ in prompts]
    plan = make_plan(lengths, ranks, seq_length, True, prompts=prompts)
    found = computed(plan, lengths, prompts)
    again = sum(found) - (sum(lengths) - (len(prompts) - groups) * prompt)
    assert again < 0.25 * (len(prompts) - groups) * prompt
    assert max(found) < 1.05 * sum(found) / ranks
    assert sum(found) < 0.85 * sum(computed(make_plan(lengths, ranks, seq_length, True), lengths, prompts))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The prompt once in 8 samples.
        ((130, 10, 512, 8, 1, 12000), 130 / 8 + 10),
        # 22 of 64 samples fit into a row: the prompt in 3 rows.
        ((600, 100, 256, 64, 1, 16000), 3 * 600 / 64 + 100),
        # On 4 ranks parts are a 32nd of the 64 x 700 tokens: 2 samples.
        ((600, 100, 64, 8, 4, 16000), 4 * 600 / 8 + 100),
        # A row has room for one sample.
        ((600, 100, 256, 64, 1, 1000), 700),
    ],
)
def test_computed_tokens_by_hand(arguments, expected):
    assert expected_computed_tokens(*arguments) == expected


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
