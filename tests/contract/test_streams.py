"""What every stream backend must do: it runs over all of `STREAM_BACKENDS`."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import STREAM_BACKENDS, StreamsConfig
from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord, StepDone, TrainerMessage, TrainingDone
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import Entry, StreamReader, StreamWriter
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.read import Feed

# Nothing here takes long; this only bounds a test that fails.
LIMIT_S = 60.0
OpenHub = Callable[..., StreamHub]
Served = tuple[str, Mapping[str, str]]


def section_of(backend: str, **config: object) -> StreamsConfig:
    streams = RunConfig.model_validate({"output_dir": "unused", "streams": {"backend": backend, **config}}).streams
    assert streams.backend == backend
    return streams


@pytest.fixture(scope="module", params=STREAM_BACKENDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The name of a backend, and the environment in which it is at work."""
    config = section_of(request.param)
    with backend_of(config).serve(config, RunDir(tmp_path_factory.mktemp(request.param)), {}) as environ:
        yield request.param, environ


@pytest.fixture
def open_hub(served: Served, tmp_path: Path) -> OpenHub:
    backend, environ = served
    test = uuid.uuid4().hex  # one server serves all tests, as it may serve several runs

    def open_(run_id: str = "run-a", folder: str = "a", **config: object) -> StreamHub:
        return StreamHub(section_of(backend, **config), RunDir(tmp_path / folder), f"{run_id}-{test}", environ)

    return open_


def record(n: int, size: int = 0) -> MetricRecord:
    return MetricRecord(source="x" * size, step=n, time=0.0, values={"n": float(n)})


def steps(entries: object) -> list[tuple[int, int]]:
    return [(entry.offset, entry.record.step) for entry in entries]  # type: ignore[attr-defined]


def read_all(reader: StreamReader[MetricRecord], count: int, timeout_s: float = 60) -> list[Entry[MetricRecord]]:
    entries: list[Entry[MetricRecord]] = []
    deadline = time.monotonic() + timeout_s
    while len(entries) < count:
        got = reader.read(max(0.0, deadline - time.monotonic()))
        assert got, f"timed out with {len(entries)} of {count} records"
        entries.extend(got)
    return entries


def test_records_come_back_in_order_with_gap_free_offsets(open_hub: OpenHub) -> None:
    hub = open_hub()
    writer = hub.writer("metrics", "a", MetricRecord)
    assert [writer.write(record(n)) for n in range(5)] == [0, 1, 2, 3, 4]
    reader = hub.reader("metrics", "a", MetricRecord)
    assert steps(reader.read(LIMIT_S)) == [(n, n) for n in range(5)]
    assert reader.offset == 5
    assert list(reader.read(0)) == []


def test_max_records_bounds_one_read(open_hub: OpenHub) -> None:
    hub = open_hub()
    writer = hub.writer("metrics", "a", MetricRecord)
    for n in range(5):
        writer.write(record(n))
    reader = hub.reader("metrics", "a", MetricRecord)
    assert steps(reader.read(LIMIT_S, max_records=2)) == [(0, 0), (1, 1)]
    assert reader.offset == 2
    assert steps(reader.read(LIMIT_S, max_records=10)) == [(2, 2), (3, 3), (4, 4)]


@pytest.mark.parametrize("offset", [0, 1, 7, 19, 20])
def test_a_reader_starts_at_any_offset(open_hub: OpenHub, offset: int) -> None:
    hub = open_hub(shard_bytes=200)
    writer = hub.writer("metrics", "a", MetricRecord)
    for n in range(20):
        writer.write(record(n))
    reader = hub.reader("metrics", "a", MetricRecord, offset=offset)
    assert reader.offset == offset
    assert steps(read_all(reader, 20 - offset)) == [(n, n) for n in range(offset, 20)]
    writer.write(record(20))
    assert steps(reader.read(LIMIT_S)) == [(20, 20)]


def test_an_offset_in_the_future_is_waited_for(open_hub: OpenHub) -> None:
    hub = open_hub(shard_bytes=200)
    writer = hub.writer("metrics", "a", MetricRecord)
    writer.write(record(0))
    reader = hub.reader("metrics", "a", MetricRecord, offset=9)
    assert list(reader.read(0.05)) == []
    for n in range(1, 12):
        writer.write(record(n))
    assert steps(read_all(reader, 3)) == [(9, 9), (10, 10), (11, 11)]


def test_a_reader_may_come_before_the_writer(open_hub: OpenHub) -> None:
    hub = open_hub()
    reader = hub.reader("metrics", "a", MetricRecord)
    assert list(reader.read(0.01)) == []
    threading.Timer(0.2, lambda: hub.writer("metrics", "a", MetricRecord).write(record(7))).start()
    assert steps(reader.read(LIMIT_S)) == [(0, 7)]


def test_a_blocked_read_ends_at_its_deadline(open_hub: OpenHub) -> None:
    reader = open_hub().reader("metrics", "a", MetricRecord)
    start = time.monotonic()
    assert list(reader.read(0.3)) == []
    assert 0.29 <= time.monotonic() - start < LIMIT_S


def test_wake_ends_a_blocked_read(open_hub: OpenHub) -> None:
    reader = open_hub().reader("metrics", "a", MetricRecord)
    threading.Timer(0.1, reader.wake).start()
    start = time.monotonic()
    assert list(reader.read(10 * LIMIT_S)) == []
    assert time.monotonic() - start < LIMIT_S


def test_a_new_writer_continues_after_the_last_record(open_hub: OpenHub) -> None:
    hub = open_hub(shard_bytes=200)
    for n in range(12):
        writer = hub.writer("metrics", "a", MetricRecord)
        assert writer.write(record(n)) == n
        writer.close()
    assert steps(read_all(hub.reader("metrics", "a", MetricRecord), 12)) == [(n, n) for n in range(12)]


def test_a_second_writer_is_refused_until_the_first_is_closed(open_hub: OpenHub) -> None:
    hub = open_hub()
    first = hub.writer("metrics", "a", MetricRecord)
    with pytest.raises(StreamError, match="already writing"):
        hub.writer("metrics", "a", MetricRecord)
    other: list[StreamWriter[MetricRecord]] = [
        hub.writer("metrics", "b", MetricRecord),
        hub.writer("fates", "a", MetricRecord),
    ]
    assert [writer.write(record(0)) for writer in other] == [0, 0]
    first.close()
    hub.writer("metrics", "a", MetricRecord).close()


def test_a_closed_writer_and_a_closed_reader_say_so(open_hub: OpenHub) -> None:
    hub = open_hub()
    writer, reader = hub.writer("metrics", "a", MetricRecord), hub.reader("metrics", "a", MetricRecord)
    for end in (writer, reader):
        end.close()
        end.close()
    reader.wake()
    with pytest.raises(StreamError, match="closed"):
        writer.write(record(0))
    with pytest.raises(StreamError, match="closed"):
        reader.read(0)


async def test_a_closed_loop_writer_says_so(open_hub: OpenHub) -> None:
    writer = open_hub(fsync="interval").loop_writer("metrics", "a", MetricRecord)
    await writer.write(record(0))
    await writer.close()
    for call in (writer.write(record(1)), writer.flush(), writer.close()):
        with pytest.raises(StreamError, match="closed"):
            await asyncio.wait_for(call, LIMIT_S)


def test_d4_streams_of_other_runs_and_instances_do_not_mix(open_hub: OpenHub) -> None:
    one, two = open_hub("run-a", "a"), open_hub("run-b", "b")
    for number, (hub, instance) in enumerate([(one, "a"), (one, "b"), (two, "a")]):
        hub.writer("metrics", instance, MetricRecord).write(record(number))
    for number, (hub, instance) in enumerate([(one, "a"), (one, "b"), (two, "a")]):
        assert steps(hub.reader("metrics", instance, MetricRecord).read(LIMIT_S)) == [(0, number)]


def test_a_union_of_messages_keeps_its_types(open_hub: OpenHub) -> None:
    hub = open_hub()
    messages: list[TrainerMessage] = [
        StepDone(step=1, time=0.0, group_ids=["g"], num_samples=2, samples_processed=2),
        TrainingDone(version=1, time=0.0, samples_processed=2),
    ]
    writer = hub.writer("trainer", "finetune_0", TrainerMessage)
    for message in messages:
        writer.write(message)
    entries = hub.reader("trainer", "finetune_0", TrainerMessage).read(LIMIT_S)
    assert [entry.record for entry in entries] == messages


def test_a_refused_record_leaves_the_stream_usable(open_hub: OpenHub) -> None:
    hub = open_hub()
    writer = hub.writer("metrics", "a", MetricRecord)
    writer.write(record(0))
    with pytest.raises(StreamError, match="must be finite"):
        writer.write(MetricRecord(source="s", step=1, time=0.0, values={"loss": float("nan")}))
    assert writer.write(record(1)) == 1
    assert steps(hub.reader("metrics", "a", MetricRecord).read(LIMIT_S)) == [(0, 0), (1, 1)]


def test_a_record_of_another_schema_is_refused_and_never_misread(
    open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = open_hub()
    with monkeypatch.context() as older:
        older.setattr("pipelinerl.records.codec.SCHEMA_VERSION", 0)
        writer = hub.writer("metrics", "a", MetricRecord)
        assert writer.write(msgspec.structs.replace(record(0), schema=0)) == 0
        writer.close()
    reader = hub.reader("metrics", "a", MetricRecord)
    for _ in range(2):
        with pytest.raises(StreamError, match=r"offset 0: .*schema 0, this version reads schema 2"):
            reader.read(LIMIT_S)
    assert reader.offset == 0


def test_a_record_of_several_megabytes(open_hub: OpenHub) -> None:
    hub = open_hub()
    writer = hub.writer("metrics", "a", MetricRecord)
    writer.write(record(0, size=5_000_000))
    writer.write(record(1))
    entries = read_all(hub.reader("metrics", "a", MetricRecord), 2)
    assert [len(entry.record.source) for entry in entries] == [5_000_000, 0]


@pytest.mark.parametrize("fsync", ["never", "interval", "always"])
def test_every_durability_policy_writes_and_flushes(open_hub: OpenHub, fsync: str) -> None:
    hub = open_hub(fsync=fsync, shard_bytes=200)
    writer = hub.writer("metrics", "a", MetricRecord)
    for n in range(6):
        writer.write(record(n))
    writer.flush()
    writer.close()
    assert steps(read_all(hub.reader("metrics", "a", MetricRecord), 6)) == [(n, n) for n in range(6)]


def test_threads_may_share_a_writer(open_hub: OpenHub) -> None:
    hub = open_hub(shard_bytes=2000)
    writer = hub.writer("metrics", "a", MetricRecord)
    offsets: list[int] = []

    def write() -> None:
        offsets.extend([writer.write(record(0)) for _ in range(100)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(offsets) == list(range(400))
    assert [e.offset for e in read_all(hub.reader("metrics", "a", MetricRecord), 400)] == list(range(400))


def test_a_reader_follows_a_writer_through_many_shards(open_hub: OpenHub) -> None:
    hub = open_hub(shard_bytes=300)
    reader = hub.reader("metrics", "a", MetricRecord)
    writer = hub.writer("metrics", "a", MetricRecord)
    thread = threading.Thread(target=lambda: [writer.write(record(n)) for n in range(2000)])
    thread.start()
    assert steps(read_all(reader, 2000)) == [(n, n) for n in range(2000)]
    thread.join()


def test_a_blocked_reader_is_woken_by_the_write(open_hub: OpenHub) -> None:
    # A reader that looked again now and then (every 0.5 or 1 s, as both do for other reasons) would take longer. What
    # the latency is on a quiet machine is for the benchmark to say.
    hub = open_hub()
    assert any(_median_latency_s(hub, instance) < 0.1 for instance in "abcdefghij")


def _median_latency_s(hub: StreamHub, instance: str) -> float:
    writer = hub.writer("metrics", instance, MetricRecord)
    reader = hub.reader("metrics", instance, MetricRecord)
    ready = threading.Semaphore(0)
    sent: list[float] = []

    def write() -> None:
        for n in range(100):
            ready.acquire()
            time.sleep(0.003)  # lets the reader block first
            sent.append(time.perf_counter())
            writer.write(record(n))

    thread = threading.Thread(target=write)
    thread.start()
    received: list[float] = []
    for _ in range(100):
        ready.release()
        assert len(reader.read(LIMIT_S)) == 1
        received.append(time.perf_counter())
    thread.join()
    return statistics.median(b - a for a, b in zip(sent, received, strict=True))


def test_a_feed_hands_over_every_record_and_stops_at_once(open_hub: OpenHub) -> None:
    hub = open_hub()
    writer = hub.writer("metrics", "a", MetricRecord)
    seen: list[int] = []
    feed = Feed(hub.reader("metrics", "a", MetricRecord), lambda e: seen.append(e.record.step), "test").start()
    writer.write(record(3))
    assert feed.wait_for(lambda: seen == [3], timeout_s=LIMIT_S)
    assert not feed.wait_for(lambda: len(seen) == 2, timeout_s=0.05)
    for n in range(4, 9):
        writer.write(record(n))
    start = time.monotonic()
    feed.stop()
    assert seen == [3, 4, 5, 6, 7, 8]
    assert time.monotonic() - start < LIMIT_S


def test_a_dead_listener_is_raised_in_whoever_waits(open_hub: OpenHub) -> None:
    hub = open_hub()
    failures: list[BaseException] = []

    def listen(entry: Entry[MetricRecord]) -> None:
        raise KeyError(f"record {entry.offset}")

    feed = Feed(hub.reader("metrics", "a", MetricRecord), listen, "test", on_failure=failures.append).start()
    threading.Timer(0.1, lambda: hub.writer("metrics", "a", MetricRecord).write(record(0))).start()
    with pytest.raises(KeyError, match="record 0"):
        feed.wait_for(lambda: False, timeout_s=LIMIT_S)
    with pytest.raises(KeyError):
        feed.raise_if_failed()
    with pytest.raises(KeyError):
        feed.stop()
    assert len(failures) == 1
