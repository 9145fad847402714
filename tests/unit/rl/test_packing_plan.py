"""`make_plan`: every sample once, nothing over its capacity, ranks balanced."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.finetune.attention import shared_prefixes
from pipelinerl.rl.packing import Groups, Plan, expected_computed_tokens, groups_of, make_plan, sample_cost


def with_prompts(lengths: list[int], prompts: list[tuple[int, int]]) -> list[list[int]]:
    """Samples of these lengths that begin with a prompt: its name and its tokens."""
    return [
        [name] * prompt + [1000 + index] * (length - prompt)
        for index, (length, (name, prompt)) in enumerate(zip(lengths, prompts, strict=True))
    ]


def nodes(tokens: list[list[int]], indices: list[int]) -> int:
    """Tokens that a row of these samples computes: those of the tree of their prefixes."""
    tree: dict[tuple[int, int], int] = {}
    for index in indices:
        at = 0
        for token in tokens[index]:
            at = tree.setdefault((at, token), len(tree) + 1)
    return len(tree)


def grouped(lengths: list[int], prompts: list[tuple[int, int]]) -> Groups:
    return groups_of(with_prompts(lengths, prompts), [str(name) for name, _ in prompts])


cases = st.tuples(
    st.lists(st.integers(1, 64), min_size=0, max_size=60), st.integers(1, 5), st.integers(64, 200), st.integers(1, 6)
)


@settings(max_examples=200, deadline=None)
@given(cases, st.booleans(), st.integers(0, 7))
def test_m5_every_sample_once_and_within_capacity(case, packed, group):
    lengths, ranks, seq_length, rows = case
    prompt = min(lengths, default=0) // 2
    tokens = with_prompts(lengths, [(index // group, prompt) for index in range(len(lengths))]) if group else None
    groups = None if tokens is None else groups_of(tokens, [str(index // group) for index in range(len(lengths))])
    plan = make_plan(lengths, ranks, seq_length, packed, rows, groups)
    assert len(plan) == ranks
    assert sorted(i for rank in plan for mb in rank for i in mb) == list(range(len(lengths)))
    assert all(mb for rank in plan for mb in rank), "no empty micro-batch"
    counts = [len(rank) for rank in plan]
    assert max(counts) - min(counts) <= 1
    for micro_batch in (mb for rank in plan for mb in rank):
        if packed:
            shared = sum(map(len, tokens or [])) and sum(lengths[i] for i in micro_batch) - nodes(tokens, micro_batch)
            assert sum(lengths[i] for i in micro_batch) - 7 / 8 * shared <= seq_length
        else:
            assert len(micro_batch) <= rows
    assert plan == make_plan(list(lengths), ranks, seq_length, packed, rows, groups), "deterministic"
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
    lengths = [20, 25, 20, 25, 20, 25]
    groups = grouped(lengths, [(1, 5), (2, 5)] * 3)
    assert make_plan(lengths, 1, 100, True, groups=groups) == [[[1, 3, 5], [0, 2, 4]]]
    assert make_plan(lengths, 1, 100, True) == [[[1, 4, 5], [0, 2, 3]]]


def test_groups_are_split_between_ranks():
    """Two groups of 16 on 4 ranks: each rank has 8 samples."""
    plan = make_plan([10] * 32, 4, 1000, True, groups=grouped([10] * 32, [(1, 5)] * 16 + [(2, 5)] * 16))
    assert [[len(row) for row in rank] for rank in plan] == [[8]] * 4


def test_a_group_that_fits_no_row_is_split():
    plan = make_plan([10] * 8, 1, 36, True, groups=grouped([10] * 8, [(1, 5)] * 8))
    # The first takes 10, each further one 5 and an eighth of the 5 in common: 5 take 32.5, and 6 would take 38.1.
    assert sorted(map(len, plan[0])) == [3, 5]


def test_a_row_has_room_for_more_samples_where_they_share_tokens():
    lengths = [100] * 8
    assert list(map(len, make_plan(lengths, 1, 300, True))) == [3]
    # 100 + 7 * (20 + 80 / 8) = 310.
    assert list(map(len, make_plan(lengths, 1, 310, True, groups=grouped(lengths, [(1, 80)] * 8)))) == [1]
    assert list(map(len, make_plan(lengths, 1, 309, True, groups=grouped(lengths, [(1, 80)] * 8)))) == [2]


@pytest.mark.parametrize(("prompt", "answer", "seq_length"), [(150, 700, 12000), (228, 772, 6604), (1, 99, 1000)])
def test_rows_are_not_longer_where_little_is_shared(prompt: int, answer: int, seq_length: int):
    lengths = [prompt + answer] * 64
    tokens = with_prompts(lengths, [(index // 8, prompt) for index in range(64)])
    (rows,) = make_plan(
        lengths, 1, seq_length, True, groups=groups_of(tokens, [str(index // 8) for index in range(64)])
    )
    for row in rows:
        shared = shared_prefixes(torch.tensor([t for index in row for t in tokens[index]]), [lengths[0]] * len(row))
        assert shared is not None
        assert len(shared.kept) + (len(shared.source) - len(shared.kept)) / 8 <= seq_length


def test_groups_by_hand():
    """A copy keeps its last token; the tokens of the longest neighbor count, not those of the shortest prompt."""
    tokens = [[1, 2, 3, 4], [1, 2, 9], [5, 5], [1, 2, 3, 4], [1, 2, 3, 5], [5, 6]]
    groups = groups_of(tokens, ["a", "a", "b", "a", "a", "b"])
    assert groups.members == [[0, 3, 4, 1], [2, 5]]
    assert groups.common == [0, 2, 0, 3, 3, 1]


def test_where_attention_keeps_more_a_shared_token_takes_more_room():
    lengths, groups = [100] * 8, grouped([100] * 8, [(1, 80)] * 8)
    # 100 + 7 * 100, and 100 + 7 * (20 + 80 / 2) = 520.
    assert list(map(len, make_plan(lengths, 1, 700, True, groups=groups, shared_room=1.0))) == [2]
    assert list(map(len, make_plan(lengths, 1, 520, True, groups=groups, shared_room=0.5))) == [1]
    assert list(map(len, make_plan(lengths, 1, 519, True, groups=groups, shared_room=0.5))) == [2]


@pytest.mark.parametrize("seed", range(10))
def test_turns_of_a_conversation_share_what_they_have_in_common(seed: int):
    """Prompts of later turns differ: a row never takes more than `seq_length` by what the trainer really shares."""
    draw = random.Random(seed)
    tokens = []
    for _ in range(12):
        history = [7] * 30
        for _ in range(draw.randrange(1, 5)):
            history = [*history, *(draw.randrange(20) for _ in range(draw.randrange(5, 40)))]
            tokens.append(history)
    names = [str(index % 3) for index in range(len(tokens))]
    plan = make_plan(list(map(len, tokens)), 2, 250, True, groups=groups_of(tokens, names))
    assert sorted(i for rank in plan for row in rank for i in row) == list(range(len(tokens)))
    for row in (row for rank in plan for row in rank):
        together = [token for index in row for token in tokens[index]]
        shared = shared_prefixes(torch.tensor(together), [len(tokens[index]) for index in row])
        kept = len(together) if shared is None else len(shared.kept)
        assert kept + (len(together) - kept) / 8 <= 250


def computed(plan: Plan, tokens: list[list[int]]) -> list[int]:
    """Tokens of each rank that go through the layers."""
    return [sum(nodes(tokens, row) for row in rank) for rank in plan]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("groups", "samples", "prompt", "seq_length"),
    [(64, 8, 130, 12000), (32, 16, 500, 4096), (64, 8, 1000, 12000), (4, 64, 600, 16000)],
)
def test_prompts_are_rarely_computed_again_and_ranks_have_equal_work(groups, samples, prompt, seq_length, ranks):
    """Also where rows are nearly full without groups."""
    draw = random.Random(groups)
    prompts = [(group, prompt) for group in range(groups) for _ in range(samples)]
    lengths = [prompt + draw.randrange(50, 150) for _ in prompts]
    tokens = with_prompts(lengths, prompts)
    plan = make_plan(lengths, ranks, seq_length, True, groups=grouped(lengths, prompts))
    found = computed(plan, tokens)
    again = sum(found) - (sum(lengths) - (len(prompts) - groups) * prompt)
    assert again < 0.25 * (len(prompts) - groups) * prompt
    assert max(found) < 1.05 * sum(found) / ranks
    assert sum(found) < 0.85 * sum(computed(make_plan(lengths, ranks, seq_length, True), tokens))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The prompt once in 8 samples.
        ((130, 10, 512, 8, 1, 12000), 130 / 8 + 10),
        # 700 + 63 * 175 = 11,725 tokens of room: 53 of 64 samples fit into a row of 9,800, the prompt is in 2 rows.
        ((600, 100, 256, 64, 1, 9800), 2 * 600 / 64 + 100),
        # On 4 ranks parts are a 32nd of the 64 samples: 2.
        ((600, 100, 64, 8, 4, 16000), 4 * 600 / 8 + 100),
        # A row has room for one sample.
        ((600, 100, 256, 64, 1, 800), 700),
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
