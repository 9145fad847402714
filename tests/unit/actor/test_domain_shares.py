"""A mix of domains: each is drawn by its weight at every moment, whatever the sizes of the data sets."""

from __future__ import annotations

from collections import Counter

from pipelinerl.actor.problems import ProblemOrder
from pipelinerl.actor.turns import Turns
from pipelinerl.domains.problem_sets import Problem

MIX = [
    *(Problem(f"a{i}", "a", {}, "a", 0.5) for i in range(3)),
    *(Problem(f"b{i}", "b", {}, "b", 0.3) for i in range(500)),
    *(Problem(f"c{i}", "c", {}, "c", 0.2) for i in range(40)),
]


def test_turns_by_hand() -> None:
    turns = Turns({"a": 2, "b": 1})
    assert [turns[number] for number in range(6)] == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1), ("a", 3)]
    assert turns[2] == ("a", 1)


def test_the_share_of_each_domain_is_within_two_percent() -> None:
    order = ProblemOrder(MIX, "7")
    counts: Counter[str] = Counter()
    for number in range(2560):
        counts[order[number].domain] += 1
        if number > 100:
            for domain, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
                assert abs(counts[domain] / (number + 1) - share) < 0.02
    assert counts == {"a": 1280, "b": 768, "c": 512}


def test_each_domain_passes_over_its_own_problems() -> None:
    order = ProblemOrder(MIX, "7")
    drawn = [order[number].id for number in range(200) if order[number].domain == "c"]
    assert len(drawn) == 40 and len(set(drawn)) == 40


def test_a_restart_finds_the_same_problems() -> None:
    first, second = ProblemOrder(MIX, "7"), ProblemOrder(MIX, "7")
    assert [first[number].id for number in range(300)][250:] == [second[number].id for number in range(250, 300)]


def test_without_shares_problems_count_by_their_number() -> None:
    order = ProblemOrder([Problem(str(i), "x", {}, "a" if i else "b") for i in range(10)], "1")
    assert sorted(order[number].id for number in range(10)) == [str(i) for i in range(10)]
