"""Order of problems, mixes of domains, passes, and seeds of rollouts: the same seed gives the same (O3)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from pipelinerl.actor.problem_order import (
    DomainMix,
    EpochCounter,
    ProblemOrder,
    evaluation_problems,
    rollout_seed,
    sample_seeds,
)
from pipelinerl.config.task import EvaluationSet
from pipelinerl.domains.user_task import Problem, ProblemSets, shared_problems

PROBLEMS = [Problem(id=str(index), dataset_name="train", data={}) for index in range(5)]


def ids(seed: str, count: int = 20) -> list[str]:
    order = ProblemOrder(PROBLEMS, seed)
    return [order[number].id for number in range(count)]


def test_every_pass_has_all_problems_in_another_order() -> None:
    order = ids("1")
    passes = [order[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(each) == list("01234") for each in passes)
    assert len({tuple(each) for each in passes}) > 1


def test_o3_the_order_follows_from_the_seed() -> None:
    assert ids("1") == ids("1")
    assert ids("1") != ids("2")


def test_o3_the_order_continues_at_any_place() -> None:
    order = ProblemOrder(PROBLEMS, "1")
    assert [order[number].id for number in (13, 2, 14)] == [ids("1")[number] for number in (13, 2, 14)]


def test_evaluations_take_the_same_problems_every_time() -> None:
    assert evaluation_problems(PROBLEMS, None, "1") == PROBLEMS
    three = evaluation_problems(PROBLEMS, 3, "1")
    assert three == evaluation_problems(PROBLEMS, 3, "1") and len({problem.id for problem in three}) == 3
    twelve = [problem.id for problem in evaluation_problems(PROBLEMS, 12, "1")]
    assert len(twelve) == 12 and {twelve.count(problem.id) for problem in PROBLEMS} == {2, 3}
    assert evaluation_problems([], 12, "1") == []


def test_sets_with_their_own_sampling_have_k_places_for_each_problem() -> None:
    sets = [EvaluationSet(name="a", k=2), EvaluationSet(name="b", problems=2, k=3)]
    problems = [*PROBLEMS, *(replace(each, evaluation_set=index) for index in (1, 2) for each in PROBLEMS)]
    places = evaluation_problems(problems, 3, "1", sets)
    assert [each.evaluation_set for each in places] == [0] * 3 + [1] * 10 + [2] * 6
    assert places[:3] == evaluation_problems(PROBLEMS, 3, "1")
    assert [each.id for each in places[3:13]] == list("0011223344")
    few = [each.id for each in places[13:]]
    assert few[0] == few[1] == few[2] != few[3] == few[4] == few[5]


def test_o3_more_samples_contain_the_seeds_of_fewer() -> None:
    a, b = PROBLEMS[:2]
    other = replace(a, dataset_name="c", evaluation_set=1)
    few, many = sample_seeds(1, [a, b]), sample_seeds(1, [other, other, b, b, a, a])
    assert len({*few, *many}) == 6 and few == [many[4], many[2]]
    # However the problem came to be in a set of its own.
    assert sample_seeds(1, [replace(a, evaluation_set=3)]) == few[:1] != sample_seeds(2, [a])


def test_shared_problems_are_known_by_their_content() -> None:
    def problem(**data: Any) -> Problem:
        return Problem(id="", dataset_name="", data=data)

    train = [problem(id="1", dataset="a", domain="a", share=0.5, q="1+1?"), problem(id="2", q="1+2?")]
    assert shared_problems(ProblemSets(train, [problem(id="3", q="1+1?"), problem(id="2", q="1+3?")])) == 1


def test_o3_rollout_seeds_differ_by_every_part() -> None:
    seeds = {
        rollout_seed(seed, "train", f"0-{group}", index) for seed in (1, 2) for group in (1, 11) for index in (1, 0)
    }
    assert len(seeds) == 8
    assert rollout_seed(1, "train", "0-1", 0) == rollout_seed(1, "train", "0-1", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)


MIX = [
    *(Problem(f"a{i}", "a", {}, "a", 0.5) for i in range(3)),
    *(Problem(f"b{i}", "b", {}, "b", 0.3) for i in range(500)),
    *(Problem(f"c{i}", "c", {}, "c", 0.2) for i in range(40)),
]


def test_a_mix_by_hand() -> None:
    mix = DomainMix({"a": 2, "b": 1})
    assert [mix[number] for number in range(6)] == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1), ("a", 3)]
    assert mix[2] == ("a", 1)


def test_the_share_of_each_domain_is_within_two_percent() -> None:
    order = ProblemOrder(MIX, "7")
    counts: Counter[str] = Counter()
    for number in range(2560):
        counts[order[number].domain] += 1
        if number > 100:
            for domain, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
                assert abs(counts[domain] / (number + 1) - share) < 0.02
    assert counts == {"a": 1280, "b": 768, "c": 512}


def test_leading_places_count() -> None:
    epochs, seen = EpochCounter(4), []
    for number in (1, 0, 3, 4, 2):
        epochs.end(number)
        seen.append(epochs.epochs_done)
    assert seen == [0.0, 0.5, 0.5, 0.5, 1.25]


@pytest.mark.parametrize(("due", "after", "done"), [([], 6, 1.5), ([1, 4], 6, 0.25), ([0, 1, 2, 3], 4, 0.0)])
def test_a_restart_continues_the_count(due: list[int], after: int, done: float) -> None:
    epochs = EpochCounter(4)
    epochs.resume(due, after)
    assert epochs.epochs_done == done
    for number in due:
        epochs.end(number)
    assert epochs.epochs_done == after / 4
