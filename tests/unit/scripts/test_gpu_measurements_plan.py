"""Which measurement starts when and where: by hand, from a list, cards and a time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from fakes.script_module import load_script

TWO, FOUR = ["0", "1"], ["0", "1", "2", "3"]


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("gpu_measurements_plan", monkeypatch)


def made(planner: ModuleType, name: str, gpus: int, expected_s: float, **others: Any) -> Any:
    given = dict(group="g", what="", limit_s=2 * expected_s, kind="tests", command=()) | others
    return planner.Measurement(name=name, gpus=gpus, expected_s=expected_s, **given)


def started(
    planner: ModuleType, waiting: list[Any], running: list[Any], cards: list[str], now: float, end: float
) -> Any:
    return {job.name: given for job, given in planner.starts(waiting, running, cards, now, end)}


def test_cards_are_disjoint_and_the_order_counts(planner: ModuleType) -> None:
    waiting = [made(planner, name, 2, 100) for name in "abc"]
    assert started(planner, waiting, [], FOUR, 0, 1000) == {"a": ("0", "1"), "b": ("2", "3")}
    running = [planner.Running(waiting[0], ("1", "2"), 0)]
    assert started(planner, waiting[1:], running, FOUR, 10, 1000) == {"b": ("0", "3")}
    assert started(planner, waiting[1:], running, ["0", "1", "2"], 10, 1000) == {}


def test_nothing_starts_that_does_not_end_in_time_or_needs_more_cards(planner: ModuleType) -> None:
    waiting = [made(planner, "wide", 4, 10), made(planner, "long", 1, 101), made(planner, "fits", 1, 100)]
    assert started(planner, waiting, [], TWO, 0, 100) == {"fits": ("0",)}
    assert started(planner, waiting, [], TWO, 1, 100) == {}


def test_one_that_waits_for_cards_is_overtaken_only_if_that_does_not_delay_it(planner: ModuleType) -> None:
    """`wide` gets its four cards at 100, when `first` is expected to end."""
    first, wide = made(planner, "first", 2, 100), made(planner, "wide", 4, 50)
    running = [planner.Running(first, ("0", "1"), 0)]
    late, soon = made(planner, "late", 2, 81), made(planner, "soon", 2, 80)
    assert started(planner, [wide, late, soon], running, FOUR, 20, 1000) == {"soon": ("2", "3")}
    # Three cards are enough: the fourth is free for anything.
    three = made(planner, "three", 3, 50)
    long = made(planner, "long", 1, 500)
    assert started(planner, [three, long], running, FOUR, 20, 1000) == {"long": ("3",)}
    # What has no time left when its cards are free holds none of them.
    assert started(planner, [wide, late], running, FOUR, 20, 149) == {"late": ("2", "3")}


def test_one_that_takes_longer_than_expected_may_use_its_limit(planner: ModuleType) -> None:
    first, wide = made(planner, "first", 2, 100, limit_s=300), made(planner, "wide", 4, 50)
    running = [planner.Running(first, ("0", "1"), 0)]
    other = made(planner, "other", 2, 150)
    assert started(planner, [wide, other], running, FOUR, 120, 1000) == {"other": ("2", "3")}
    assert started(planner, [wide, other], running, FOUR, 160, 1000) == {}


def test_tests_share_cards_with_tests_alone(planner: ModuleType) -> None:
    tests = [made(planner, f"test-{number}", 2, 100, alone=False) for number in range(6)]
    timed = made(planner, "timed", 1, 10)
    assert planner.SHARERS == 4
    assert list(started(planner, [*tests, timed], [], TWO, 0, 1000)) == [f"test-{number}" for number in range(4)]
    running = [planner.Running(timed, ("0",), 0)]
    small = made(planner, "small", 1, 10, alone=False)
    assert started(planner, [small], running, TWO, 1, 1000) == {"small": ("1",)}
    # Of cards that are shared, the one with the fewest.
    running = [planner.Running(made(planner, "one", 1, 50, alone=False), ("0",), 0)]
    assert started(planner, [small], running, TWO, 1, 1000) == {"small": ("1",)}
    # A fifth one waits for the first of the four to end, not for the last.
    running = [planner.Running(made(planner, str(end), 2, end, alone=False), ("0", "1"), 0) for end in (40, 60, 80, 90)]
    fifth, timed = made(planner, "fifth", 2, 30, alone=False), made(planner, "timed", 2, 10)
    assert [job.start_s for job in planner.plan([*(job.measurement for job in running), fifth, timed], TWO, 1000)] == [
        *(0, 0, 0, 0),
        40,
        90,
    ]


def test_a_plan_by_expected_times(planner: ModuleType) -> None:
    a, b, c, d = (
        made(planner, name, gpus, s) for name, gpus, s in [("a", 2, 30), ("b", 2, 50), ("c", 4, 20), ("d", 2, 20)]
    )
    found = [(job.measurement.name, job.start_s, job.cards) for job in planner.plan([a, b, c, d], FOUR, 90)]
    # `d` overtakes `c` on the cards of `a`, because it ends when `b` does.
    assert found == [("a", 0, ("0", "1")), ("b", 0, ("2", "3")), ("d", 30, ("0", "1")), ("c", 50, tuple(FOUR))]
    assert [job.measurement.name for job in planner.plan([a, b, c, d], FOUR, 69)] == ["a", "b", "d"]


def test_some_are_chosen_by_name_or_group(planner: ModuleType) -> None:
    a, b, c = made(planner, "a", 1, 1), made(planner, "b", 1, 1, group="h"), made(planner, "c", 1, 1)
    assert planner.chosen([a, b, c], [], []) == [a, b, c]
    assert planner.chosen([a, b, c], ["b", "g"], []) == [b, a, c]
    assert planner.chosen([a, b, c], ["g", "a"], ["c"]) == [a]
    assert planner.chosen([a, b, c], [], ["g"]) == [b]
    with pytest.raises(ValueError, match="got x, y, expected names or groups: a, b, c, g, h"):
        planner.chosen([a, b, c], ["x"], ["y"])
