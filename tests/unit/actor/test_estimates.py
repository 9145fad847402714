"""avg@k, pass@k and their intervals, with values worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from fakes.made_up_rollouts import ended
from fakes.short_sample import evaluation_result
from msgspec.structs import replace

from pipelinerl.actor.estimates import estimates, interval, pass_at, summarize
from pipelinerl.actor.worker_messages import RolloutFailed
from pipelinerl.domains.user_task import Problem


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 1, 1, 1.0),
        (4, 0, 4, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 3, 2, 1.0),  # no two wrong ones
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 3, 5, 11 / 12),  # 1 - C(7,5)/C(10,5) = 1 - 21/252
        (2000, 1, 1000, 1 / 2),
    ],
)
def test_pass_at_k_is_the_unbiased_estimate(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(6, 2, 3), (5, 4, 2), (7, 3, 1)])
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_needs_k_samples(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at(n, c, k)


def test_with_one_sample_a_problem_the_interval_is_wilsons() -> None:
    """7 of 10: center (0.7 + z²/20) / (1 + z²/10), half width z / (1 + z²/10) sqrt(0.021 + z²/400), z = 1.96."""
    found = interval([1.0] * 7 + [0.0] * 3, 10)
    assert found.value == pytest.approx(0.7)
    assert (found.low, found.high) == (pytest.approx(0.39677, abs=1e-5), pytest.approx(0.89221, abs=1e-5))
    none = interval([0.0] * 10, 10)
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(0.27753, abs=1e-5))
    every = interval([1.0] * 10, 10)
    assert (every.value, every.low, every.high) == (1.0, pytest.approx(1 - 0.27753, abs=1e-5), 1.0)


def test_samples_of_one_problem_are_not_independent() -> None:
    """4 problems with 100 samples each: 4 samples if each is always or never solved, 400 if all are alike."""
    alone = interval([1.0, 1.0, 0.0, 0.0], 4)
    assert interval([1.0, 1.0, 0.0, 0.0], 400) == alone
    alike = interval([0.5] * 4, 400)
    assert (alike.low, alike.high) == (pytest.approx(0.45125, abs=1e-4), pytest.approx(0.54875, abs=1e-4))
    # Shares 0.25 and 0.75: variance 4 * 0.0625 / 16 = 0.015625, so n = 0.25 / 0.015625 = 16, as for 8 of 16.
    between = interval([0.25, 0.25, 0.75, 0.75], 400)
    assert between == interval([1.0] * 8 + [0.0] * 8, 16)


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Two samples of each of 20 problems, of which each is solved with chance 0.2 or 0.8: over all 3^20 outcomes, by
    the number of problems with both, one and no success."""
    shares = {1.0: (0.04 + 0.64) / 2, 0.5: 0.16 * 2, 0.0: (0.64 + 0.04) / 2}
    covered = total = 0.0
    for both in range(21):
        for one in range(21 - both):
            none = 20 - both - one
            ways = math.factorial(20) // (math.factorial(both) * math.factorial(one) * math.factorial(none))
            chance = ways * shares[1.0] ** both * shares[0.5] ** one * shares[0.0] ** none
            found = interval([1.0] * both + [0.5] * one + [0.0] * none, 40)
            total += chance
            covered += chance * (found.low <= 0.5 <= found.high)
    assert total == pytest.approx(1.0)
    assert 0.93 < covered < 0.97


def test_names_and_values_of_the_estimates() -> None:
    """4 samples of three problems, 4, 1 and 0 of them correct, and one sample of a fourth, which is correct."""
    outcomes = [[True] * 4, [False, True, False, False], [False] * 4, [True], []]
    found = estimates(outcomes, 4)
    assert {name: each.value for name, each in found.items()} == {
        "avg_at_4": pytest.approx((1 + 0.25 + 0 + 1) / 4),
        "pass_at_1": pytest.approx((1 + 0.25 + 0 + 1) / 4),
        "pass_at_2": pytest.approx((1 + 0.5 + 0) / 3),  # the fourth has too few
        "pass_at_4": pytest.approx((1 + 1 + 0) / 3),
    }
    assert list(estimates([[True] * 6], 6)) == ["avg_at_6", "pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]
    assert list(estimates([[True], [False]], 1)) == ["avg_at_1"]
    assert estimates([[], []], 2) == {}
    assert all(each.low <= each.value <= each.high for each in found.values())


TEMPLATE = evaluation_result()


def test_every_problem_counts_the_same_over_all_sets() -> None:
    """The same id in two plain sets, one sample each, and a set with 4 samples, of which one is right."""
    right, wrong = (replace(ended(reward=float(is_right)), dataset_name=None) for is_right in (True, False))
    right = replace(right, summary=replace(right.summary, success=True))
    wrong = replace(wrong, summary=replace(wrong.summary, success=False))
    a, b = (Problem(id="p", dataset_name=name, data={}) for name in "ab")
    c = Problem(id="p", dataset_name="c", data={}, evaluation_set=1)
    every, *_ = summarize([a, b, c, c, c, c], [right, wrong, right, wrong, wrong, wrong], TEMPLATE)
    assert (every.num_problems, every.attempts, every.num_rollouts) == (3, 1, 6)
    assert every.success_rate == every.mean_reward == pytest.approx((1 + 0 + 1 / 4) / 3)
    assert every.estimates["avg_at_1"].value == every.success_rate


def test_the_same_problem_in_two_sets_is_two_problems() -> None:
    one = Problem(id="p", dataset_name="a", data={})
    other = replace(one, dataset_name="b", evaluation_set=1)
    short = ended()
    cut = replace(short, summary=replace(short.summary, num_cut=1, output_tokens=9, success=False))
    short = replace(short, summary=replace(short.summary, output_tokens=3, success=True), dataset_name=None)
    cut = replace(cut, dataset_name=None)
    failed = RolloutFailed(0, "timeout", "")
    every, a, b = summarize([one, other, other, other], [short, cut, short, failed], TEMPLATE)
    assert (every.dataset_name, every.num_problems, every.attempts) == ("all", 2, 1)
    assert every.estimates["avg_at_1"].value == pytest.approx((1 + 1 / 2) / 2)
    assert (a.num_problems, a.attempts, a.output_tokens, a.cut_fraction) == (1, 1, 3.0, 0.0)
    assert (b.num_problems, b.attempts, b.output_tokens, b.cut_fraction) == (1, 3, 6.0, 0.5)
    # Two of the three ended: none of the problems has three.
    assert {name: each.value for name, each in b.estimates.items()} == {
        "avg_at_3": 0.5, "pass_at_1": 0.5, "pass_at_2": 1.0
    }  # fmt: skip
