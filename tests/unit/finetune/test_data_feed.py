"""The wait for the next batch: it ends for a server that needs weights, for a stop, and in time."""

from __future__ import annotations

import threading

import pytest

from pipelinerl.config.sections import StreamsConfig
from pipelinerl.errors import WorkerError
from pipelinerl.finetune.data_feed import DataFeed
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import TrainingBatch
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub

WAIT_S = 60.0


@pytest.fixture
def hub(tmp_path):
    return StreamHub(StreamsConfig(), RunDir(tmp_path), "run")


def reader_of(hub):
    return hub.reader("training_data", "preprocessor_0", TrainingBatch)


def test_a_server_that_waits_is_served_while_there_is_no_data(hub, kit):
    waiting, served = threading.Event(), []
    reader, writer = reader_of(hub), hub.writer("training_data", "preprocessor_0", TrainingBatch)
    feed = DataFeed(reader, kit.heartbeat(), WAIT_S, server_waits=waiting.is_set)

    def serve():
        served.append(feed.offset)
        waiting.clear()
        if len(served) == 1:  # another server comes while the first is served
            waiting.set()
            reader.wake()
        else:
            writer.write(kit.batch(kit.samples(4), step=1))

    def arrive():
        waiting.set()
        reader.wake()

    thread = threading.Thread(target=arrive)
    thread.start()
    assert feed.next(1, serve).step == 1
    thread.join()
    assert served == [0, 0] and feed.offset == 1


def test_a_wake_up_for_nothing_does_not_end_the_wait(hub, kit):
    reader, writer = reader_of(hub), hub.writer("training_data", "preprocessor_0", TrainingBatch)
    feed = DataFeed(reader, kit.heartbeat(), WAIT_S)
    reader.wake()
    writer.write(kit.batch(kit.samples(4), step=1))
    assert feed.next(1).step == 1


def test_the_deadline_holds_whatever_wakes_it(hub, kit):
    reader = reader_of(hub)
    feed = DataFeed(reader, kit.heartbeat(), 0.2)
    reader.wake()
    with pytest.raises(WorkerError, match=r"no training data for 0\.2 s"):
        feed.next(1)


@pytest.mark.parametrize("ends_behind", [1, 2])
def test_the_end_of_the_passes_is_heard_behind_the_last_batch(hub, kit, ends_behind):
    """Also where it is known before that batch was read, and where it comes while the feed waits."""
    reader, writer = reader_of(hub), hub.writer("training_data", "preprocessor_0", TrainingBatch)
    ends: set[int] = set()
    feed = DataFeed(reader, kit.heartbeat(), WAIT_S, is_over=ends.__contains__)
    for step in range(1, ends_behind + 1):
        writer.write(kit.batch(kit.samples(4), step=step))
    if ends_behind == 1:
        ends.add(1)
    for step in range(1, ends_behind + 1):
        assert feed.next(step).step == step and not feed.is_over

    def say():
        ends.add(ends_behind)
        reader.wake()

    thread = threading.Thread(target=say)
    thread.start()
    assert feed.next(ends_behind + 1) is None and feed.is_over
    thread.join()


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


def test_other_ranks_do_what_rank_0_says(hub, kit):
    hub.writer("training_data", "preprocessor_0", TrainingBatch).write(kit.batch(kit.samples(4), step=1))
    served = []
    batch, stop, server, timeout, over = range(5)
    feed = DataFeed(
        reader_of(hub), kit.heartbeat(), WAIT_S, lambda: True, OtherRank([server, batch, stop, timeout, over])
    )
    # Its own wish to stop does not count: the ranks agree on that elsewhere.
    assert feed.next(1, lambda: served.append(1)).step == 1
    assert served == [1]
    assert feed.next(2) is None
    assert not feed.is_over
    with pytest.raises(WorkerError, match="no training data"):
        feed.next(2)
    assert feed.next(2) is None and feed.is_over, "all ranks end at the same step"
