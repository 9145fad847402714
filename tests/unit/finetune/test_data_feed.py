"""The wait for the next batch: a server that needs weights, a stop, the last pass or the deadline ends it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from fakes.short_sample import evaluation_result

from pipelinerl.config.resources import FileStreams
from pipelinerl.errors import WorkerError
from pipelinerl.finetune.data_feed import DataFeed, PassesEnd, StopRequest, TargetReached
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import EvaluationResult, PassesOver, TrainingBatch
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub


@pytest.fixture
def hub(tmp_path):
    return StreamHub(FileStreams(), RunDir(tmp_path), "run")


@pytest.fixture
def reader(hub):
    return hub.reader("training_data", "preprocessor_0", TrainingBatch)


@pytest.fixture
def writer(hub):
    return hub.writer("training_data", "preprocessor_0", TrainingBatch)


@pytest.fixture
def feed_of(reader, kit):
    def make(timeout_s=60.0, ranks=None, **others):
        ranks = ranks or Ranks()
        return DataFeed(reader, kit.heartbeat(), timeout_s, ranks, StopRequest(ranks), **others)

    return make


def refuse(version):
    raise AssertionError(version)


def test_a_server_that_waits_is_served_while_there_is_no_data(feed_of, reader, writer, kit):
    weights, served = SimpleNamespace(has_fresh=False), []
    feed = feed_of(weights=weights)

    def serve(version):
        served.append((version, feed.offset))
        weights.has_fresh = False
        if len(served) == 1:  # another server comes while the first is served
            weights.has_fresh = True
            reader.wake()
        else:
            writer.write(kit.batch(kit.samples(4), step=1))

    def arrive():
        weights.has_fresh = True
        reader.wake()

    thread = threading.Thread(target=arrive)
    thread.start()
    assert feed.next(1, serve).step == 1
    thread.join()
    assert served == [(0, 0), (0, 0)] and feed.offset == 1


def test_a_wake_up_for_nothing_does_not_end_the_wait(feed_of, reader, writer, kit):
    reader.wake()
    writer.write(kit.batch(kit.samples(4), step=1))
    assert feed_of().next(1, refuse).step == 1


def test_the_deadline_holds_whatever_wakes_it(feed_of, reader):
    reader.wake()
    with pytest.raises(WorkerError, match=r"0\.2 s"):
        feed_of(0.2).next(1, refuse)


@pytest.mark.parametrize("last", [1, 2])
def test_the_end_of_the_passes_is_heard_after_the_last_batch(hub, feed_of, reader, writer, kit, last):
    """Also where it is known before that batch was read, and where it comes while the feed waits. What a start with
    fewer passes wrote is ignored."""
    passes = PassesEnd(hub.reader("passes", "preprocessor_0", PassesOver), 2, reader.wake)
    ends = hub.writer("passes", "preprocessor_0", PassesOver)
    feed = feed_of(passes=passes)

    def say(step, max_epochs):
        ends.write(PassesOver(step=step, max_epochs=max_epochs, time=0.0))
        ends.flush()

    say(0, 1)
    for step in range(1, last + 1):
        writer.write(kit.batch(kit.samples(4), step=step))
    if last == 1:
        say(1, 2)
        while not passes.is_after(1):
            time.sleep(0.001)
    for step in range(1, last + 1):
        assert feed.next(step, refuse).step == step and not feed.is_over
    thread = threading.Thread(target=say, args=(last, 2))
    thread.start()
    assert feed.next(last + 1, refuse) is None and feed.is_over
    thread.join()
    passes.close()


class OtherRank(Ranks):
    """Rank 1, which hears `news` from rank 0 one after the other."""

    def __new__(cls, news):
        made = super().__new__(cls)
        object.__setattr__(made, "news", news)
        return made

    def __init__(self, news):
        super().__init__(rank=1, world_size=2)

    def broadcast(self, value):
        return self.news.pop(0)


def test_other_ranks_do_what_rank_0_says(feed_of, writer, kit):
    writer.write(kit.batch(kit.samples(4), step=1))
    served = []
    batch, stop, server, timeout, over = range(5)
    feed = feed_of(ranks=OtherRank([server, batch, stop, timeout, over]))
    # Its own wish to stop does not count: the ranks agree on that elsewhere.
    feed._stop.requested = True
    assert feed.next(1, served.append).step == 1
    assert served == [0]
    assert feed.next(2, refuse) is None
    assert not feed.is_over
    with pytest.raises(WorkerError):
        feed.next(2, refuse)
    assert feed.next(2, refuse) is None and feed.is_over, "all ranks end at the same step"


def evaluation(success_rate, due=0, dataset_name="all", late=0):
    versions = {"min_version": due + late, "max_version": due + late + 1}
    return evaluation_result(due, success_rate, dataset_name=dataset_name, **versions)


def test_an_evaluation_over_all_test_data_that_reaches_the_target_ends_training(hub, feed_of, reader, writer, kit):
    """Not one of a single set, nor one without a result; batches that are ready are not taken any more."""
    target = TargetReached(hub.reader("evaluation", "actor_0", EvaluationResult), 0.9, reader.wake)
    results = hub.writer("evaluation", "actor_0", EvaluationResult)
    feed = feed_of(target=target)
    for record in (evaluation(0.89), evaluation(1.0, dataset_name="a"), evaluation(None, due=1)):
        results.write(record)
    for step in (1, 2, 3):
        writer.write(kit.batch(kit.samples(4), step=step))
    for step in (1, 2):
        assert feed.next(step, refuse).step == step and not feed.is_over
    results.write(evaluation(0.9, due=2))
    deadline = time.monotonic() + 60
    while not target.is_reached(2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert feed.next(3, refuse) is None and feed.is_over
    target.close()
    again = TargetReached(hub.reader("evaluation", "actor_0", EvaluationResult), 0.91, reader.wake)
    again.close()
    assert not again.is_reached(2)


@pytest.mark.parametrize(("resumed_at", "ends_after"), [(0, 3), (2, 3), (3, 3), (4, 4)])
def test_a_run_that_resumes_before_the_version_that_reached_the_target_trains_up_to_it(
    hub, reader, writer, kit, feed_of, resumed_at, ends_after
):
    """Version 3 reached it (its evaluation was due at 2), and then training states were lost."""
    results = hub.writer("evaluation", "actor_0", EvaluationResult)
    for record in (evaluation(0.5), evaluation(0.95, due=2, late=1), evaluation(0.99, due=4)):
        results.write(record)
    target = TargetReached(hub.reader("evaluation", "actor_0", EvaluationResult), 0.9, reader.wake)
    target.close()  # all results of the earlier start are known
    for step in range(resumed_at + 1, 7):
        writer.write(kit.batch(kit.samples(4), step=step))
    feed = feed_of(target=target)
    step = resumed_at
    while feed.next(step + 1, refuse) is not None:
        step += 1
    assert (step, feed.is_over) == (ends_after, True)
