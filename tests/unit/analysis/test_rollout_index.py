"""The index of rollouts of `view`: its pages, and the names in it."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.short_sample import rollout_summary

from pipelinerl.analysis.view.rollout_index import Filter, GroupRow, Names, RolloutIndex
from pipelinerl.streams.base import Entry


def test_pages_of_an_index_that_grows_at_both_ends() -> None:
    index = RolloutIndex()
    groups, attempts = 3000, 64

    def rollouts(n: int) -> GroupRow:
        own = [rollout_summary(f"{n}/{k}", n + k / 64, success=k == 0) for k in range(attempts)]
        return GroupRow(id=str(n), samples=[], rollouts=own, problem_id=str(n % 7))

    for n in range(1000, groups):
        index.add(n, rollouts(n))
    index.fill(iter(Entry(n, rollouts(n)) for n in range(1000)))
    assert index.span == (0, groups) and index.num_rollouts == groups * attempts
    hits, total = index.find(Filter(problem="3", success=True), "newest", 2500, 0, 3)
    assert [hit.offset for hit in hits] == [2495, 2488, 2481]
    assert total == sum(n % 7 == 3 for n in range(2500))
    best, _ = index.find(Filter(), "best", groups, 0, 2)
    assert [(hit.offset, hit.place) for hit in best] == [(2999, 63), (2999, 62)]
    assert index.at(7, 5).reward == pytest.approx(7 + 5 / 64)


def test_threads_give_each_name_a_number_of_its_own() -> None:
    names, texts = Names(), [f"data set {number}" for number in range(2000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(
                pool.map(
                    lambda seed: [names.number(each) for each in random.Random(seed).sample(texts, 2000)], range(4)
                )
            )
    finally:
        sys.setswitchinterval(before)
    assert [names.text(names.number(each)) for each in texts] == texts
    assert {names.number(each) for each in texts} == set(range(1, 2001))
