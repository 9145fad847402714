"""Advantage estimators with numbers worked out by hand; equal rewards, small groups, rollouts of several samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.rl.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    discounted_returns,
    gae,
    group_advantages,
    has_signal,
    length_penalty,
)

DIVIDING = ("rloo", "grpo", "reinforce_baseline")
BASELINED = ["rloo", "grpo", "dr_grpo", "reinforce_baseline"]


def advantages(rewards, name, divide=None):
    """Of `rewards[rollout][sample]`, or of one sample per rollout. `divide` where the estimator has that key."""
    rows = [reward if isinstance(reward, list) else [reward] for reward in rewards]
    division = {} if divide is None or name not in DIVIDING else {"divide_advantage_by_std": divide}
    rl = RLConfig(advantage_estimator=name, **division)
    found = group_advantages(AdvantageInputs(rows), rl)
    return found if rewards and isinstance(rewards[0], list) else [row[0] for row in found]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # mean 1/4, std with n - 1: sqrt((9/16 + 3/16) / 3) = 1/2.
        ("grpo", [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", [1.0, 0.0, 0.0, 0.0]),
        ("reinforce_baseline", [0.75, -0.25, -0.25, -0.25]),
        ("gae", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_m1_one_success_in_four(name, expected):
    assert advantages([1, 0, 0, 0], name) == pytest.approx(expected)


@pytest.mark.parametrize("name", BASELINED)
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [1.0] * 5, [0.0] * 3, [-1.7] * 7, [1e-9, 1e-9], [0.7]]
)
def test_m1_equal_rewards_give_exactly_zero(name, divide, rewards):
    assert advantages(rewards, name, divide) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3), min_size=1, max_size=9), st.booleans())
def test_m1_finite_and_bounded(name, rewards, divide):
    flat = [a for row in advantages(rewards, name, divide) for a in row]
    assert all(math.isfinite(a) for a in flat)
    span = max(abs(r) for row in rewards for r in row)
    assert all(abs(a) <= 2.001 * span * (1e4 if divide and name in DIVIDING else 1) + 1e-9 for a in flat)


@pytest.mark.parametrize("name", BASELINED)
def test_m5_a_rollout_counts_once_however_many_samples_it_has(name):
    one = advantages([[1.0], [0.0], [0.5]], name)
    many = advantages([[1.0] * 7, [0.0], [0.5] * 3], name)
    assert [row[0] for row in one] == pytest.approx([row[0] for row in many])
    assert [len(row) for row in many] == [7, 1, 3]
    assert all(len(set(row)) == 1 for row in many)


def test_std_option_on_leave_one_out():
    # A = +-1, std([1, 0]) with n - 1 = sqrt(1/2).
    expected = 1 / (math.sqrt(0.5) + 1e-4)
    assert advantages([1, 0], "rloo", divide=True) == pytest.approx([expected, -expected])


@pytest.mark.parametrize(
    ("rl", "signals"),
    [
        ({}, [True, False, True]),
        ({"relu_log_p_weights": True}, [False, False, True]),
        # What the step stage adds or subtracts can make any advantage positive, but does not count as a signal.
        ({"relu_log_p_weights": True, "reward_minus_kl_coef": 0.1}, [True, False, True]),
        ({"relu_log_p_weights": True, "advantage_estimator": "reinforce_baseline"}, [True, False, True]),
        ({"relu_log_p_weights": True, "advantage_estimator": "gae"}, [True, False, True]),
    ],
)
def test_signal(rl, signals):
    assert [has_signal(a, RLConfig(**rl)) for a in (-1.0, 0.0, 1.0)] == signals


def test_discounted_returns():
    assert discounted_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert discounted_returns([], 0.5) == []


def test_length_penalty_by_hand():
    rl = RLConfig(overlong_buffer_tokens=4, overlong_limit_tokens=10, overlong_penalty=0.5)
    assert [length_penalty(n, rl) for n in (5, 6, 7, 8, 10, 12)] == [0.0, 0.0, 0.125, 0.25, 0.5, 0.5]
    assert length_penalty(12, RLConfig()) == 0.0


def test_gae_by_hand():
    # gamma 0.9, lambda 0.5. delta_1 = 1 - 0.4 = 0.6; delta_0 = 0.9 * 0.4 - 0.5 = -0.14; A_0 = -0.14 + 0.45 * 0.6.
    found, targets = gae([0.0, 1.0], [0.5, 0.4], 0.9, 0.5)
    assert found == pytest.approx([0.13, 0.6])
    assert targets == pytest.approx([0.63, 1.0])
    # lambda = gamma = 1: advantage = reward to go - value.
    assert gae([0.0, 0.0, 1.0], [0.2, 0.3, 0.4])[0] == pytest.approx([0.8, 0.7, 0.6])
