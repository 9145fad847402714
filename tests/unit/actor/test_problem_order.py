"""Order of problems and seeds of rollouts: the same seed gives the same (O3)."""

from __future__ import annotations

from pipelinerl.actor.problems import ProblemOrder, evaluation_problems, rollout_seed
from pipelinerl.domains.problem_sets import Problem

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


def test_o3_the_order_goes_on_from_any_place() -> None:
    order = ProblemOrder(PROBLEMS, "1")
    assert [order[number].id for number in (13, 2, 14)] == [ids("1")[number] for number in (13, 2, 14)]


def test_evaluations_take_the_same_problems_every_time() -> None:
    assert evaluation_problems(PROBLEMS, None, "1") == PROBLEMS
    three = evaluation_problems(PROBLEMS, 3, "1")
    assert three == evaluation_problems(PROBLEMS, 3, "1") and len({problem.id for problem in three}) == 3
    twelve = [problem.id for problem in evaluation_problems(PROBLEMS, 12, "1")]
    assert len(twelve) == 12 and {twelve.count(problem.id) for problem in PROBLEMS} == {2, 3}
    assert evaluation_problems([], 12, "1") == []


def test_o3_rollout_seeds_differ_by_every_part() -> None:
    seeds = {
        rollout_seed(seed, "train", f"0-{group}", index) for seed in (1, 2) for group in (1, 11) for index in (1, 0)
    }
    assert len(seeds) == 8
    assert rollout_seed(1, "train", "0-1", 0) == rollout_seed(1, "train", "0-1", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)
