"""Streams in Redis within a byte budget: back-pressure, what moves to files, and that nothing is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pipelinerl.config.resources import RedisStreams
from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import ACTOR_TOPIC, FATES_TOPIC, PREPROCESSOR_CONSUMER, StreamSpec
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.redis import LARGE_SHARE, SMALL_SHARE
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer, connect
from pipelinerl.streams.redis_writer import ARCHIVE_FOLDER, FIELD, OVERHEAD_BYTES, stream_keys
from pipelinerl.streams.shards import list_shards, stream_dir

BUDGET = 8 * 2**20
RECORD_BYTES = 100_000
LIMIT_S = 60.0
SPEC = StreamSpec(ACTOR_TOPIC, "actor_0")
KEYS = stream_keys("run", SPEC)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), RedisStreams(backend="redis", byte_budget=BUDGET)) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Any:
    client = connect(server.url)
    client.flushall()
    return client


def open_hub(server: RedisServer, tmp_path: Path, **config: Any) -> StreamHub:
    section = RedisStreams(backend="redis", **{"byte_budget": BUDGET, "shard_bytes": 10**6, **config})
    return StreamHub(section, RunDir(tmp_path), "run", {REDIS_URL_KEY: server.url})


def record(n: int, size: int = RECORD_BYTES) -> MetricRecord:
    return MetricRecord(source="x" * size, step=n, time=0.0, values={})


def read_steps(reader: Any, count: int, seen: Callable[[], None] = lambda: None) -> list[int]:
    steps: list[int] = []
    while len(steps) < count and (entries := reader.read(LIMIT_S)):
        steps += [entry.record.step for entry in entries]
        assert [entry.offset for entry in entries] == [entry.record.step for entry in entries]
        seen()
    return steps


def test_d6_memory_stays_within_the_budget_while_a_consumer_is_paused(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    total, empty = 200, client.info("memory")["used_memory"]
    hub = open_hub(server, tmp_path)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    consumer = hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, consumer=PREPROCESSOR_CONSUMER)
    waits = threading.Event()
    make_room = writer._make_room  # type: ignore[attr-defined]

    def noticed() -> None:
        waits.set()
        make_room()

    writer._make_room = noticed  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: [writer.write(record(n)) for n in range(total)], daemon=True)
    thread.start()
    assert waits.wait(LIMIT_S)
    fits = int(BUDGET * LARGE_SHARE) // (RECORD_BYTES + OVERHEAD_BYTES)
    assert 0.9 * fits <= int(client.get(KEYS.written)) <= fits < total
    peaks = [client.info("memory")["used_memory"]]

    def look() -> None:
        peaks.append(client.info("memory")["used_memory"])

    assert read_steps(consumer, total, look) == list(range(total))
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert max(peaks) - empty < BUDGET
    assert read_steps(hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord), total) == list(range(total))
    assert read_steps(hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, 7), total - 7) == list(range(7, total))


def test_d6_a_stream_that_stays_full_ends_with_the_name_of_the_reader(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    hub = open_hub(server, tmp_path, backpressure_timeout_s=0.1)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    with pytest.raises(StreamError, match=r"actor_0.*streams\.backpressure_timeout_s.*preprocessor"):
        for n in range(100):
            writer.write(record(n))
    reader = hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, consumer=PREPROCESSOR_CONSUMER)
    reader.read(LIMIT_S, max_records=1)
    written = int(client.get(KEYS.written))
    with pytest.raises(StreamError, match="preprocessor is at offset 0"):
        writer.write(record(written))
    read_steps(reader, written - 1)
    reader.read(0)
    assert writer.write(record(written)) == written
    assert read_steps(reader, 1) == [written]


def test_a_stream_whose_reader_is_no_part_of_the_run_is_never_waited_for(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    """Rollouts or batches alone (`debug.mode`): older records move to the archive, and another run reads them there."""
    hub, total = open_hub(server, tmp_path, backpressure_timeout_s=0.1), 200
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord, is_consumed=False)
    for n in range(total):
        writer.write(record(n))
    assert int(client.get(KEYS.size)) <= int(BUDGET * LARGE_SHARE)
    assert read_steps(hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord), total) == list(range(total))


def test_d6_a_reader_repeats_how_far_it_has_come_when_the_server_has_forgotten_it(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    """A server that is killed may lose the newest hash; the reader has nothing new to say, the writer waits for it."""
    hub = open_hub(server, tmp_path)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    reader = hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, consumer=PREPROCESSOR_CONSUMER)
    fits = int(BUDGET * LARGE_SHARE) // (RECORD_BYTES + OVERHEAD_BYTES)
    for n in range(fits):
        writer.write(record(n))
    assert read_steps(reader, fits) == list(range(fits))
    reader.read(0)
    assert client.hget(KEYS.consumed, PREPROCESSOR_CONSUMER) == b"%d" % fits
    client.delete(KEYS.consumed)
    took: list[int] = []
    thread = threading.Thread(target=lambda: took.extend(read_steps(reader, 1)), daemon=True)
    thread.start()
    assert writer.write(record(fits)) == fits  # waits for room
    thread.join(LIMIT_S)
    assert took == [fits]


def test_d6_a_reader_that_could_not_say_how_far_it_has_come_says_it_at_its_next_read(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    hub = open_hub(server, tmp_path)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    reader = hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, consumer=PREPROCESSOR_CONSUMER)
    writer.write(record(0))
    assert read_steps(reader, 1) == [0]
    hset = reader._client.hset  # type: ignore[attr-defined]

    def lost(*_: Any) -> Any:
        raise redis.ConnectionError("reset by peer")

    reader._client.hset = lost  # type: ignore[attr-defined]
    with pytest.raises(StreamError, match="the server does not answer: reset by peer"):
        reader.read(0)
    reader._client.hset = hset  # type: ignore[attr-defined]
    assert reader.read(0) == []
    assert client.hget(KEYS.consumed, PREPROCESSOR_CONSUMER) == b"1"


def test_d6_what_a_full_server_lost_is_sent_again(server: RedisServer, client: Any, tmp_path: Path) -> None:
    """A server that comes back as it was may be full again: what has left it since is there again, too."""
    hub = open_hub(server, tmp_path)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    reader = hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, consumer=PREPROCESSOR_CONSUMER)
    fits = int(BUDGET * LARGE_SHARE) // (RECORD_BYTES + OVERHEAD_BYTES)
    for n in range(fits):
        writer.write(record(n))
    assert read_steps(reader, fits) == list(range(fits))
    reader.read(0)
    before = {key: client.dump(key) for key in client.scan_iter()}
    for n in range(fits, fits + 3):  # the older ones move to the archive
        writer.write(record(n))
    client.flushall()
    for key, value in before.items():
        client.restore(key, 0, value)
    assert writer.write(record(fits + 3)) == fits + 3
    assert read_steps(hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord), fits + 4) == list(range(fits + 4))
    assert read_steps(reader, 4) == list(range(fits, fits + 4))


def test_small_streams_move_their_older_half_and_stay_whole(server: RedisServer, client: Any, tmp_path: Path) -> None:
    hub, size, total = open_hub(server, tmp_path), 1000, 1000
    writer = hub.writer(FATES_TOPIC, "actor_0", MetricRecord)
    for n in range(total):
        assert writer.write(record(n, size)) == n
    keys = stream_keys("run", StreamSpec(FATES_TOPIC, "actor_0"))
    assert int(client.get(keys.size)) <= BUDGET * SMALL_SHARE < total * size
    assert client.xlen(keys.log) < total
    assert read_steps(hub.reader(FATES_TOPIC, "actor_0", MetricRecord), total) == list(range(total))
    writer.close()
    assert hub.writer(FATES_TOPIC, "actor_0", MetricRecord).write(record(total, size)) == total


def test_a_record_larger_than_the_budget_still_passes(server: RedisServer, client: Any, tmp_path: Path) -> None:
    hub = open_hub(server, tmp_path)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    reader = hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord, consumer=PREPROCESSOR_CONSUMER)
    for n in range(4):
        writer.write(record(n, size=BUDGET))
        assert read_steps(reader, 1) == [n]
        reader.read(0)
    assert client.xlen(KEYS.log) <= 2


def test_d6_a_server_that_came_back_without_what_was_moved_is_refused(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    hub = open_hub(server, tmp_path)
    writer = hub.writer(FATES_TOPIC, "actor_0", MetricRecord)
    for n in range(500):
        writer.write(record(n, 1000))
    writer.close()
    client.flushall()
    with pytest.raises(StreamError, match=r"the server has 0 records, but \d+ were written"):
        hub.writer(FATES_TOPIC, "actor_0", MetricRecord)


def test_a_crash_between_copy_and_removal_doubles_nothing(server: RedisServer, client: Any, tmp_path: Path) -> None:
    hub = open_hub(server, tmp_path)
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    for n in range(6):
        writer.write(record(n, 10))
    writer._trim = lambda **_: 0  # type: ignore[attr-defined]  # the crash
    writer._limit_bytes = 1  # type: ignore[attr-defined]
    assert writer._move(3) > 0  # type: ignore[attr-defined]
    writer.close()
    writer = hub.writer(ACTOR_TOPIC, "actor_0", MetricRecord)
    assert client.xlen(KEYS.log) == 6
    while writer._move(5):  # type: ignore[attr-defined]
        pass
    assert client.xlen(KEYS.log) == 1
    assert int(client.get(KEYS.size)) == len(client.xrange(KEYS.log)[0][1][FIELD]) + OVERHEAD_BYTES
    assert list_shards(stream_dir(RunDir(tmp_path).streams, SPEC) / ARCHIVE_FOLDER) == [0]
    assert read_steps(hub.reader(ACTOR_TOPIC, "actor_0", MetricRecord), 6) == list(range(6))
