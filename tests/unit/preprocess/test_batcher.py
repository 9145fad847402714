"""The batcher's queue, its ring and its staleness rule; when batches go out, and which is the last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocess_groups import group, sample

from pipelinerl.config.schedule import Rounds
from pipelinerl.errors import StreamError
from pipelinerl.preprocess.batcher import Batcher, LastStep, num_samples
from pipelinerl.preprocess.main import MAX_STEPS_AHEAD, TrainerView
from pipelinerl.records import StepDone, TrainerStarted, TrainingDone, WeightUpdateSuccess
from pipelinerl.streams.base import Entry


def ready(name, count, offset=0, version=0):
    items = [sample(f"{name}/r{i}/s0", version=version, advantage=1.0) for i in range(count)]
    return Entry(offset, group(name, samples=items))


def names(closed):
    return [entry.record.id for entry in closed]


def test_whole_groups_until_the_step_is_full():
    batcher = Batcher(5)
    for offset, name in enumerate("abcd"):
        batcher.add(ready(name, 2, offset))
    assert batcher.close_step(1) is not None and batcher.num_samples == 2
    assert batcher.oldest_offset == 3
    assert batcher.close_step(2) is None
    batcher.add(ready("e", 9, 4))
    closed = batcher.close_step(2)
    assert names(closed) == ["d", "e"] and num_samples(closed) == 11
    assert batcher.oldest_offset is None and batcher.num_samples == 0


def test_ring_drops_the_oldest():
    batcher = Batcher(2, capacity_samples=4, drop_oldest=True)
    assert [batcher.add(ready(name, 2)) for name in "ab"] == [[], []]
    dropped = batcher.add(ready("c", 2))
    assert [(r.sample.group_id, r.fate, r.reason) for r in dropped] == [("a", "stale", "dropped_oldest")] * 2
    assert not batcher.is_full
    assert names(batcher.close_step(1)) == ["b"]


def test_without_dropping_the_reader_is_told_to_stop():
    batcher = Batcher(2, capacity_samples=4)
    for name in "abc":
        assert batcher.add(ready(name, 2)) == []
        assert batcher.is_full == (name != "a")
    assert batcher.num_samples == 6


def test_stale_samples_leave_before_a_step_closes():
    batcher = Batcher(2, max_version_lag=1)
    batcher.add(ready("old", 2, version=0))
    batcher.add(ready("new", 2, version=2))
    # Step 3 trains weights of version 2: version 0 lags by 2.
    rejections = batcher.purge_stale(3)
    assert {r.sample.group_id for r in rejections} == {"old"} and len(rejections) == 2
    assert names(batcher.close_step(3)) == ["new"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), max_size=40),
    st.integers(1, 6),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, 0, 1, 3]),
)
def test_every_sample_leaves_exactly_once_and_never_too_old(events, per_step, capacity, drop, max_lag):
    batcher = Batcher(per_step, capacity, drop, max_lag)
    submitted, left, step = [], [], 1
    for offset, (count, version, close) in enumerate(events):
        entry = ready(f"g{offset}", count, offset, min(version, step - 1))
        submitted += [item.id for item in entry.record.samples]
        left += [r.sample.id for r in batcher.add(entry)]
        if close:
            left += [r.sample.id for r in batcher.purge_stale(step)]
            if closed := batcher.close_step(step):
                samples = [item for entry in closed for item in entry.record.samples]
                assert len(samples) >= per_step
                assert all(max_lag is None or step - 1 - item.min_version <= max_lag for item in samples)
                left += [item.id for item in samples]
                step += 1
        assert len(submitted) == len(left) + batcher.num_samples
    assert len(set(left)) == len(left) and set(left) <= set(submitted)


def step_done(step, incarnation=0):
    return StepDone(step=step, time=0, group_ids=[], num_samples=1, samples_processed=1, incarnation=incarnation)


def test_two_steps_ahead_and_no_more():
    view = TrainerView(incarnation=0, first_step=1)
    assert [view.may_dispatch(step) for step in (1, 2, 3)] == [True, True, False]
    view.take(step_done(1))
    assert view.may_dispatch(3) and not view.may_dispatch(4)
    assert MAX_STEPS_AHEAD == 2


def test_a_trainer_that_went_back_is_waited_for():
    view = TrainerView(incarnation=1, first_step=12)
    view.take(step_done(11, incarnation=0))
    assert view.changes == 0
    view.take(WeightUpdateSuccess(version=5, time=0, seconds={}, num_servers=1, incarnation=1))
    assert not view.may_dispatch(12)
    view.take(step_done(10, incarnation=1))
    assert view.may_dispatch(12)


def test_a_training_state_ahead_of_the_stream_is_refused():
    view = TrainerView(incarnation=1, first_step=4)
    view.take(TrainerStarted(step=7, data_offset=7, time=0, incarnation=0))
    with pytest.raises(StreamError, match=r"step 4, .* step 3"):
        view.take(TrainerStarted(step=4, data_offset=4, time=0, incarnation=1))
    view.take(TrainerStarted(step=3, data_offset=3, time=0, incarnation=1))
    assert view.may_dispatch(5) and not view.may_dispatch(6)


def test_the_end_of_an_earlier_incarnation_is_not_ours():
    view = TrainerView(incarnation=1, first_step=1)
    done = TrainingDone(version=3, time=0, samples_processed=9, incarnation=0)
    view.take(done)
    assert not view.is_done
    view.take(TrainingDone(version=3, time=0, samples_processed=9, incarnation=1))
    assert view.is_done


def test_without_a_trainer_nothing_holds_back():
    assert TrainerView(0, 1, bounded=False).may_dispatch(1000)


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


@pytest.mark.parametrize("rounds", [None, Rounds(3, 4, 100)])
def test_the_rest_is_taken_whole_group_by_whole_group(rounds: Rounds | None) -> None:
    batcher = Batcher(4, rounds=rounds)
    assert batcher.close_rest(1, 9) is None
    for offset, size in enumerate([2, 3, 1]):
        batcher.add(ready(f"0-{offset}", size, offset))
    assert names(batcher.close_rest(1, 3)) == ["0-0", "0-1"]
    assert batcher.close_rest(2, 2) is None, "what came later is not of the rest"
    assert num_samples(batcher.close_rest(2, 3)) == 1
    assert batcher.close_rest(3, 3) is None and batcher.num_samples == 0 and batcher.oldest_offset is None
