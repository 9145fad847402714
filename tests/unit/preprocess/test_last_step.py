"""The batch that ends the passes is not waited for longer than one more pass takes, and nothing comes behind it."""

from __future__ import annotations

import pytest
from preprocess_groups import sample

from pipelinerl.config.schedule import Rounds
from pipelinerl.preprocess.batcher import Batcher, ReadyGroup
from pipelinerl.preprocess.last_step import LastStep
from pipelinerl.records import ScoredSample


@pytest.mark.parametrize(
    ("max_epochs", "interval", "step", "closed", "is_closed"),
    [
        (2, 1, 5, 1.9, False),
        (2, 1, 5, 2.0, True),
        (2, 4, 5, 2.5, False),
        (2, 4, 8, 2.5, True),
        (2, 1, 0, 0.0, False),
        (None, 1, 5, 9.0, False),
    ],
)
def test_no_batch_is_due_behind_the_one_that_ends_training(
    max_epochs: int | None, interval: int, step: int, closed: float, is_closed: bool
) -> None:
    resumed = LastStep(max_epochs, interval, step, closed)
    assert resumed.is_closed is is_closed
    went_on = LastStep(max_epochs, interval, 0, 0.0)
    went_on.close(step, closed)
    assert went_on.is_closed is is_closed


@pytest.mark.parametrize(
    ("closed", "seen", "is_over"),
    [
        (0.9, (1.0, 1.9), False),
        (0.9, (1.0, 2.0), True),
        (0.0, (0.5, 1.0, 1.5, 2.0), True),
        # A slow group was waited for: what ran beside it did so before the passes were over.
        (0.9, (3.5,), False),
        (0.9, (3.5, 4.5), True),
        # A batch was closed meanwhile, which was none to end with: each has a pass to be filled.
        (1.5, (1.6, 2.4), False),
        (1.5, (1.6, 2.5), True),
    ],
)
def test_one_more_pass_is_waited_for(closed: float, seen: tuple[float, ...], is_over: bool) -> None:
    last = LastStep(1, 4, 2, closed)
    for epochs_done in (*seen, 0.1):
        last.see(epochs_done)
    assert last.wait_no_longer(7) is is_over
    last.see(9.0)
    assert last.wait_no_longer(8) and last.rest_end == (7 if is_over else 8)


def test_a_batch_behind_the_passes_gives_the_next_one_a_pass() -> None:
    last = LastStep(1, 4, 0, 0.0)
    last.see(1.0)
    last.see(1.7)
    last.close(1, 1.7)
    last.see(2.6)
    assert not last.wait_no_longer(7)
    last.see(2.7)
    assert last.wait_no_longer(8) and not last.is_closed
    last.close(4, 2.7)
    assert last.is_closed


def test_without_max_epochs_nothing_ends() -> None:
    last = LastStep(None, 1, 0, 0.0)
    last.see(100.0)
    assert not last.wait_no_longer(7) and not last.is_closed


@pytest.mark.parametrize("rounds", [None, Rounds(3, 4, 100)])
def test_the_rest_is_taken_whole_group_by_whole_group(rounds: Rounds | None) -> None:
    batcher = Batcher(4, rounds=rounds)
    assert batcher.close_rest(1, 9) is None
    for offset, (size, done) in enumerate([(2, 0.5), (3, 1.5), (1, 1.0)]):
        samples = [ScoredSample(sample=sample(f"0-{offset}/r{i}/s0"), advantages=[1.0]) for i in range(size)]
        batcher.add(ReadyGroup(f"0-{offset}", offset, tuple(samples), done))
    first = batcher.close_rest(1, 3)
    assert first is not None and [group.group_id for group in first.groups] == ["0-0", "0-1"]
    assert first.epochs_done == 1.5
    assert batcher.close_rest(2, 2) is None, "what came later is not of the rest"
    second = batcher.close_rest(2, 3)
    assert second is not None and len(second.samples) == 1
    assert batcher.close_rest(3, 3) is None and batcher.num_samples == 0 and batcher.oldest_offset is None
