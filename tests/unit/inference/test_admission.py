"""When requests start in batches, step by step and worked out by hand; and what is refused."""

from __future__ import annotations

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.inference.admission import (
    BATCH_FRACTION_VARIABLE,
    WAIT_STEPS_VARIABLE,
    AdmissionBatcher,
    batcher_from,
)


@pytest.mark.parametrize(
    ("running", "ready", "held"),
    [
        (0, 1, False),  # nothing runs: at once
        (0, 0, False),
        (31, 1, False),  # 31 / 16 is 1: one is a batch
        (32, 1, True),
        (32, 2, False),
        (47, 1, True),  # 47 / 16 is 2, rounded down
        (47, 2, False),
        (256, 15, True),
        (256, 16, False),
        (256, 200, False),
        (256, 0, False),
    ],
)
def test_a_sixteenth_of_those_that_run_is_a_batch(running: int, ready: int, held: bool) -> None:
    assert AdmissionBatcher(8).holds(running, ready) is held


def waits(batcher: AdmissionBatcher, running: int, ready: list[int]) -> list[bool]:
    """What is held in each step if all that is ready starts as soon as it is let."""
    found = []
    for count in ready:
        found.append(batcher.holds(running, count))
        if found[-1]:
            batcher.held()
        else:
            batcher.offered(count, 0, cut_short=False)
    return found


def test_nobody_waits_longer_than_the_limit() -> None:
    # One comes in each of three steps; the first of them has waited 3 steps in the fourth.
    assert waits(AdmissionBatcher(3), 256, [1, 2, 3, 3, 1, 1]) == [True, True, True, False, True, True]


def test_steps_in_which_nobody_waits_do_not_count() -> None:
    assert waits(AdmissionBatcher(2), 256, [0, 0, 0, 1, 1, 1]) == [False, False, False, True, True, False]
    # The one that waited went away (aborted): the next one's time begins anew.
    assert waits(AdmissionBatcher(2), 256, [1, 0, 1, 1, 1]) == [True, False, True, True, False]


def test_who_waits_for_memory_is_no_batch_and_is_offered_its_place_again() -> None:
    batcher = AdmissionBatcher(3)
    assert not batcher.holds(64, 10)  # 4 are a batch
    batcher.offered(6, 4, cut_short=False)  # no memory for 4 of them
    assert batcher.holds(64, 4)
    batcher.held()
    assert batcher.holds(64, 7)  # 3 are new
    batcher.held()
    assert not batcher.holds(64, 8)  # 4 are new
    batcher.offered(0, 8, cut_short=False)  # still no memory; 3 steps have passed
    for _ in range(5):  # from now on in every step, as without batches
        assert not batcher.holds(64, 8)
        batcher.offered(0, 8, cut_short=False)
    assert not batcher.holds(64, 8)
    batcher.offered(1, 7, cut_short=False)
    assert batcher.holds(64, 7)  # one got in: a new batch is collected
    # Those that had no memory go away; whoever comes then is new.
    assert not batcher.holds(64, 0)
    batcher.offered(0, 0, cut_short=False)
    assert not batcher.holds(64, 4)


def test_who_had_no_tokens_in_the_step_starts_in_the_next() -> None:
    batcher = AdmissionBatcher(8)
    batcher.offered(100, 1, cut_short=True)
    assert not batcher.holds(100, 1)
    # If none could start then, it was not for want of tokens.
    batcher.offered(0, 1, cut_short=True)
    assert batcher.holds(100, 1)


def test_the_part_can_be_chosen() -> None:
    assert AdmissionBatcher(8, 0.25).holds(256, 63)
    assert not AdmissionBatcher(8, 0.25).holds(256, 64)
    assert not AdmissionBatcher(8, 1.0).holds(1, 1)


def test_off_unless_the_environment_asks() -> None:
    assert batcher_from({}) is None
    assert batcher_from({WAIT_STEPS_VARIABLE: "0", BATCH_FRACTION_VARIABLE: "0.5"}) is None
    batcher = batcher_from({WAIT_STEPS_VARIABLE: "2", BATCH_FRACTION_VARIABLE: "0.5"})
    assert batcher is not None and waits(batcher, 8, [3, 3, 3]) == [True, True, False]


@pytest.mark.parametrize("text", ["-1", "65", "1.5", "eight", "", "\u0661"])
def test_steps_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{WAIT_STEPS_VARIABLE}: got .*expected an integer from 0 to 64"):
        batcher_from({WAIT_STEPS_VARIABLE: text})


@pytest.mark.parametrize("text", ["0", "-0.1", "1.01", "nan", "inf", "a tenth"])
def test_parts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{BATCH_FRACTION_VARIABLE}: got .*expected a number above 0, at most 1"):
        batcher_from({WAIT_STEPS_VARIABLE: "0", BATCH_FRACTION_VARIABLE: text})
