"""Advantage families with numbers worked out by hand; equal rewards, tiny groups, rollouts of several samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.rl.advantages import (
    ADVANTAGES,
    discounted_returns,
    group_advantages,
    kl_rewards,
    normalize_batch,
    rewards_to_go,
)
from pipelinerl.rl.advantages.gae import gae

BASELINED = ["rloo", "grpo", "dr_grpo", "reinforce_baseline"]


def single(rewards):
    """One sample per rollout."""
    return [[r] for r in rewards]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # mean 1/4, std with n - 1: sqrt((9/16 + 3/16) / 3) = 1/2.
        ("grpo", [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", [1.0, 0.0, 0.0, 0.0]),
        ("reinforce_baseline", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_m1_one_success_in_four(name, expected):
    got = group_advantages(single([1, 0, 0, 0]), name)
    assert [row[0] for row in got] == pytest.approx(expected)


@pytest.mark.parametrize("name", BASELINED)
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [1.0] * 5, [0.0] * 3, [-1.7] * 7, [1e-9, 1e-9], [0.7]]
)
def test_m1_equal_rewards_give_exactly_zero(name, divide, rewards):
    assert group_advantages(single(rewards), name, divide) == [[0.0]] * len(rewards)


@pytest.mark.parametrize("name", ["reinforce", "gae"])
def test_m1_without_a_baseline_nothing_is_divided_by_the_spread(name):
    # Equal rewards have a standard deviation of 0: dividing by it (+ 1e-4) would make advantages of 10,000.
    assert group_advantages(single([1.0, 1.0, 1.0]), name, True) == [[1.0]] * 3


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3), min_size=1, max_size=9), st.booleans())
def test_m1_finite_and_bounded(name, rewards, divide):
    flat = [a for row in group_advantages(rewards, name, divide) for a in row]
    assert all(math.isfinite(a) for a in flat)
    span = max(abs(r) for row in rewards for r in row)
    assert all(abs(a) <= 2.001 * span * (1e4 if divide or name == "grpo" else 1) + 1e-9 for a in flat)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_grpo_is_bounded_by_the_group_size(rewards):
    # |R_i - mean| <= (n - 1) / sqrt(n) * std for any n numbers.
    n = len(rewards)
    assert all(abs(row[0]) <= (n - 1) / math.sqrt(n) + 1e-6 for row in group_advantages(single(rewards), "grpo"))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(rewards):
    n = len(rewards)
    loo, dr = group_advantages(single(rewards), "rloo"), group_advantages(single(rewards), "dr_grpo")
    assert [a[0] for a in loo] == pytest.approx([a[0] * n / (n - 1) for a in dr], abs=1e-6)


@pytest.mark.parametrize("name", BASELINED)
def test_m5_a_rollout_counts_once_however_many_samples_it_has(name):
    one = group_advantages([[1.0], [0.0], [0.5]], name)
    many = group_advantages([[1.0] * 7, [0.0], [0.5] * 3], name)
    assert [row[0] for row in one] == pytest.approx([row[0] for row in many])
    assert [len(row) for row in many] == [7, 1, 3]
    assert all(len(set(row)) == 1 for row in many)


def test_std_option_on_leave_one_out():
    got = group_advantages(single([1, 0]), "rloo", divide_advantage_by_std=True)
    # A = +-1, std([1, 0]) with n - 1 = sqrt(1/2).
    assert [row[0] for row in got] == pytest.approx([1 / (math.sqrt(0.5) + 1e-4), -1 / (math.sqrt(0.5) + 1e-4)])


def test_discounted_returns():
    assert discounted_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert discounted_returns([], 0.5) == []


def test_normalize_batch_weighs_tokens():
    # Values 3 (1 token) and 1 (3 tokens): mean 1.5, variance (2.25 + 3 * 0.25) / 4 = 0.75.
    got = normalize_batch([[3.0], [1.0]], [1, 3])
    assert got == [pytest.approx([1.5 / math.sqrt(0.75)]), pytest.approx([-0.5 / math.sqrt(0.75)])]
    assert normalize_batch([[0.1 + 0.2], [0.3]], [5, 5]) == [[0.0], [0.0]]
    assert normalize_batch([], []) == []
    assert normalize_batch([[1.0], [2.0]], [0, 0]) == [[0.0], [0.0]]


def test_normalize_batch_takes_a_value_for_each_token():
    # Values 1 (2 tokens), 0 and 4: mean 1.5, variance (2 * 0.25 + 2.25 + 6.25) / 4 = 2.25.
    got = normalize_batch([[1.0], [0.0, 4.0], []], [2, 2, 0])
    assert [value for values in got for value in values] == pytest.approx([-1 / 3, -1.0, 5 / 3])
    assert [len(values) for values in got] == [1, 2, 0]
    with pytest.raises(ValueError, match="2 advantages for 3 tokens"):
        normalize_batch([[1.0, 2.0]], [3])


def test_kl_as_a_reward_by_hand():
    assert kl_rewards([-1.0, -2.0], [-1.5, -1.0], 0.1) == pytest.approx([-0.05, 0.1])
    assert rewards_to_go([1.0, -2.0, 4.0]) == [3.0, 2.0, 4.0]
    assert rewards_to_go([]) == []
    with pytest.raises(ValueError, match="1 ref_logprobs for 2 trained tokens"):
        kl_rewards([-1.0, -2.0], [-1.5], 0.1)


def test_gae_by_hand():
    # gamma 0.9, lambda 0.5. delta_1 = 1 - 0.4 = 0.6; delta_0 = 0.9 * 0.4 - 0.5 = -0.14; A_0 = -0.14 + 0.45 * 0.6.
    advantages, returns = gae([0.0, 1.0], [0.5, 0.4], 0.9, 0.5)
    assert advantages == pytest.approx([0.13, 0.6])
    assert returns == pytest.approx([0.63, 1.0])
    # lambda = gamma = 1: advantage = reward to go - value.
    assert gae([0.0, 0.0, 1.0], [0.2, 0.3, 0.4])[0] == pytest.approx([0.8, 0.7, 0.6])


def test_faults_are_named():
    with pytest.raises(ValueError, match="advantage_estimator: got 'ppo'"):
        group_advantages([[1.0]], "ppo")
    with pytest.raises(ValueError, match="without samples"):
        group_advantages([[1.0], []], "rloo")
    with pytest.raises(ValueError, match="2 rewards for 1 values"):
        gae([0.0, 1.0], [0.0])
