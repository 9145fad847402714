"""The batcher's queue, its ring and its staleness rule; how far ahead of the trainer batches go out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocess_groups import sample

from pipelinerl.errors import StreamError
from pipelinerl.preprocess.batcher import Batcher, ReadyGroup
from pipelinerl.preprocess.dispatch import MAX_STEPS_AHEAD, TrainerView
from pipelinerl.records import ScoredSample, StepDone, TrainerStarted, TrainingDone, WeightUpdateSuccess


def ready(name, count, offset=0, version=0):
    items = [ScoredSample(sample=sample(f"{name}/r{i}/s0", version=version), advantages=[1.0]) for i in range(count)]
    return ReadyGroup(name, offset, tuple(items))


def names(closed):
    return [group.group_id for group in closed.groups]


def test_whole_groups_until_the_step_is_full():
    batcher = Batcher(5)
    for offset, name in enumerate("abcd"):
        batcher.add(ready(name, 2, offset))
    assert batcher.close_step(1) is not None and batcher.num_samples == 2
    assert batcher.oldest_offset == 3
    assert batcher.close_step(2) is None
    batcher.add(ready("e", 9, 4))
    closed = batcher.close_step(2)
    assert names(closed) == ["d", "e"] and len(closed.samples) == 11
    assert batcher.oldest_offset is None and batcher.num_samples == 0


def test_an_empty_group_takes_no_place():
    batcher = Batcher(1)
    batcher.add(ready("a", 0))
    assert batcher.close_step(1) is None and batcher.oldest_offset is None


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


def test_a_group_larger_than_the_ring_still_trains():
    batcher = Batcher(2, capacity_samples=3, drop_oldest=True)
    batcher.add(ready("a", 1))
    assert len(batcher.add(ready("b", 8))) == 1
    assert names(batcher.close_step(1)) == ["b"]


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
        group = ready(f"g{offset}", count, offset, min(version, step - 1))
        submitted += [item.sample.id for item in group.samples]
        left += [r.sample.id for r in batcher.add(group)]
        if close:
            left += [r.sample.id for r in batcher.purge_stale(step)]
            if closed := batcher.close_step(step):
                assert len(closed.samples) >= per_step
                assert all(max_lag is None or step - 1 - item.sample.min_version <= max_lag for item in closed.samples)
                left += [item.sample.id for item in closed.samples]
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
    with pytest.raises(StreamError, match=r"goes on from step 4, but .* ends with the batch of step 3"):
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
