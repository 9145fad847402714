"""What is special to streams in Redis: repeated writes, restarts of the server, and which servers are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import redis
from fakes.short_sample import encode

from pipelinerl.config.resources import RedisStreams
from pipelinerl.errors import ConfigError, StreamError, UserError, WorkerError
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import StreamSpec
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.redis import RedisBackend, RedisReader
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer, check_server, connect, shown
from pipelinerl.streams.redis_writer import FIELD, RedisWriter, stream_keys

CONFIG = RedisStreams(backend="redis", fsync="interval")
NO_ARCHIVE = Path("/nonexistent")
KEYS = stream_keys("run", StreamSpec("metrics", "a"))


def record(n: int) -> MetricRecord:
    return MetricRecord(source="s", step=n, time=0.0, values={})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", CONFIG) as running:
        yield running


def open_writer(server: RedisServer, tmp_path: Path) -> RedisWriter[MetricRecord]:
    return RedisWriter(connect(server.url), KEYS, MetricRecord, tmp_path / "lock", CONFIG, CONFIG.byte_budget)


def open_reader(server: RedisServer, offset: int = 0) -> RedisReader[MetricRecord]:
    return RedisReader(connect(server.url), KEYS, MetricRecord, offset, NO_ARCHIVE)


def read_steps(reader: RedisReader[MetricRecord], count: int) -> list[int]:
    steps: list[int] = []
    while len(steps) < count and (entries := reader.read(60)):
        steps += [entry.record.step for entry in entries]
    return steps


def test_keys_carry_the_run_and_the_password_stays_out_of_messages() -> None:
    assert KEYS[:2] == ("{pipelinerl:run:metrics:a:0}:log", "{pipelinerl:run:metrics:a:0}:count")
    assert shown("redis://user:secret@host:6379/0") == "redis://host:6379/0"
    assert shown("redis://host:6379/0?password=secret") == "redis://host:6379/0"
    assert shown("unix:///run/redis.sock") == "unix:///run/redis.sock"
    for password in ("top://secret", "top@secret", "top?secret", "top?secret=secret"):
        for url in (f"redis://:{password}@host:6379/0", f":{password}@host:6379/0"):
            assert "top" not in shown(url) and "secret" not in shown(url)
        for url in (f"redis://host:6379/0?password={password}", f"unix:///redis.sock?password={password}&db=0"):
            assert "top" not in shown(url) and "secret" not in shown(url)


@pytest.mark.parametrize("url", ["redis://:top/secret@host:6379/0", "host:6379", "http://:secret@host/0"])
def test_an_address_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(StreamError, match="expected redis://") as caught:
        connect(url)
    assert "secret" not in str(caught.value) and "top" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_d9_a_write_that_is_repeated_is_one_write(server: RedisServer, tmp_path: Path) -> None:
    writer = open_writer(server, tmp_path)
    writer.write(record(0))
    assert writer._send(1, encode(record(0))) == 1  # as after a lost answer
    assert writer.write(record(1)) == 1
    assert read_steps(open_reader(server), 2) == [0, 1]
    with pytest.raises(StreamError, match="another record at offset 0"):
        writer._send(1, encode(record(9)))


def test_d6_a_killed_server_comes_back_and_leaves_no_gap(server: RedisServer, tmp_path: Path) -> None:
    writer, reader = open_writer(server, tmp_path), open_reader(server)
    for n in range(3):
        writer.write(record(n))
    assert read_steps(reader, 2)[:2] == [0, 1]
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    for n in range(3, 6):
        assert writer.write(record(n)) == n
    writer.flush()
    assert server.pid != killed
    assert read_steps(open_reader(server), 6) == [0, 1, 2, 3, 4, 5]
    assert read_steps(reader, 6 - reader.offset)[-1] == 5


def test_d6_records_that_the_server_lost_are_sent_again(server: RedisServer, tmp_path: Path) -> None:
    writer = open_writer(server, tmp_path)
    for n in range(4):
        writer.write(record(n))
    client = connect(server.url)
    client.flushall()
    for n in range(2):
        client.xadd(KEYS[0], {FIELD: encode(record(n))}, id=f"{n + 1}-0")
    client.set(KEYS[1], 2)
    assert writer.write(record(4)) == 4
    assert read_steps(open_reader(server), 5) == [0, 1, 2, 3, 4]


def test_d6_lost_records_that_are_no_longer_in_memory_are_named(server: RedisServer, tmp_path: Path) -> None:
    writer = open_writer(server, tmp_path)
    for n in range(4):
        writer.write(record(n))
    writer._tail.popleft()
    connect(server.url).flushall()
    for _ in range(2):
        with pytest.raises(StreamError, match=r"lost the records of offsets 0\.\.3"):
            writer.write(record(4))


def test_corrupt_and_missing_records_are_reported_with_key_and_offset(server: RedisServer, tmp_path: Path) -> None:
    client = connect(server.url)
    client.xadd(KEYS[0], {FIELD: encode(record(0))}, id="1-0")
    client.xadd(KEYS[0], {FIELD: b"garbage"}, id="2-0")
    reader = open_reader(server)
    assert read_steps(reader, 1) == [0]
    for _ in range(2):
        with pytest.raises(StreamError, match=r"metrics:a:0}:log, offset 1: not a MetricRecord"):
            reader.read(0)
    client.xdel(KEYS[0], "2-0")
    client.xadd(KEYS[0], {FIELD: encode(record(2))}, id="3-0")
    with pytest.raises(StreamError, match=r"offset 1: .* 3-0$"):
        reader.read(0)


def test_o1_a_full_server_is_a_stream_error(tmp_path: Path) -> None:
    config = RedisStreams(backend="redis", byte_budget=3_000_000)
    with RedisServer(tmp_path / "redis", config) as server:
        writer = open_writer(server, tmp_path)
        with pytest.raises(StreamError, match=r"cannot be written.*(OOM|memory)"):
            for _ in range(40):
                writer.write(MetricRecord(source="x" * 2_000_000, step=0, time=0.0, values={}))


def test_a_server_that_is_gone_is_a_stream_error(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", CONFIG) as server:
        client = connect(server.url, retries=1)
        writer: RedisWriter[MetricRecord] = RedisWriter(client, KEYS, MetricRecord, tmp_path / "lock", CONFIG, 10**6)
        reader: RedisReader[MetricRecord] = RedisReader(client, KEYS, MetricRecord, 0, NO_ARCHIVE)
    with pytest.raises(StreamError, match="offset 0 cannot be written"):
        writer.write(record(0))
    with pytest.raises(StreamError, match="does not answer"):
        reader.read(1)


def _flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [lambda file: _flip(file, 3), lambda file: _flip(file, -20), lambda file: os.truncate(file, 40), Path.unlink],
    ids=["length", "value", "cut", "gone"],
)
def test_d6_records_that_were_damaged_between_two_starts_are_refused(tmp_path: Path, damage: object) -> None:
    for count in (0, 4):
        with RedisServer(tmp_path / "redis", CONFIG) as server:
            writer = open_writer(server, tmp_path)
            assert writer.next_offset == count
            for n in range(4):
                writer.write(record(n))
            writer.close()
    (file,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
    damage(file)  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(UserError, match=file.name):
            RedisServer(tmp_path / "redis", CONFIG)


def test_d6_a_start_that_fails_leaves_the_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(tmp_path / "redis", CONFIG) as server:
        writer = open_writer(server, tmp_path)
        writer.write(record(0))
        writer.close()
    left = (tmp_path / "redis" / "checksums.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("pipelinerl.streams.redis_server.find_server", lambda: "/bin/false")
        with pytest.raises(WorkerError):
            RedisServer(tmp_path / "redis", CONFIG)
    assert (tmp_path / "redis" / "checksums.json").read_bytes() == left
    with RedisServer(tmp_path / "redis", CONFIG) as server:
        assert open_writer(server, tmp_path).next_offset == 1
        assert not (tmp_path / "redis" / "checksums.json").exists()


def test_d6_the_torn_end_of_a_killed_server_is_cut_off_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "redis", CONFIG) as server:
        writer = open_writer(server, tmp_path)
        for n in range(4):
            writer.write(record(n))
        writer.close()
    (tmp_path / "redis" / "checksums.json").unlink()  # as if the server had no time to end
    (file,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
    os.truncate(file, file.stat().st_size - 10)
    with RedisServer(tmp_path / "redis", CONFIG) as server:
        assert open_writer(server, tmp_path).next_offset == 3
    assert file.name in caplog.text


def test_d6_a_count_that_does_not_fit_the_log_is_refused(server: RedisServer, tmp_path: Path) -> None:
    writer = open_writer(server, tmp_path)
    writer.write(record(0))
    writer.close()
    connect(server.url).set(KEYS.written, 7)
    with pytest.raises(StreamError, match="counts 7 records, but its log ends after 1"):
        open_writer(server, tmp_path)


def hub(environ_url: str, tmp_path: Path, **config: object) -> StreamHub:
    return StreamHub(RedisStreams(backend="redis", **config), RunDir(tmp_path), "r", {REDIS_URL_KEY: environ_url})


def test_d3_a_run_continues_only_with_the_server_that_has_its_records(server: RedisServer, tmp_path: Path) -> None:
    run_dir, environ = RunDir(tmp_path / "run"), {REDIS_URL_KEY: server.url}
    for _ in range(2):
        with RedisBackend.serve(CONFIG, run_dir, environ) as served:
            assert served == environ
    (place,) = [file.read_text() for file in run_dir.root.rglob("*") if file.is_file()]
    address = server.url.rpartition("@")[2].partition("/")[0]
    assert address in place and server.url.split(":")[2].partition("@")[0] not in place
    for other in ({REDIS_URL_KEY: server.url.removesuffix("0") + "1"}, {}):
        with pytest.raises(ConfigError, match=f"{address}.* holds the records"):
            RedisBackend.serve(CONFIG, run_dir, other).__enter__()


def test_d6_servers_that_could_lose_records_are_refused(server: RedisServer, tmp_path: Path) -> None:
    hub("", tmp_path, url=server.url)
    with pytest.raises(StreamError, match=r"no server\. Set streams\.url"):
        hub("", tmp_path)
    with pytest.raises(StreamError, match="cannot be used"):
        hub("http://x", tmp_path)
    wrong = server.url.replace("redis://:", "redis://:wrong")
    with pytest.raises(StreamError, match="does not answer") as caught:
        hub(wrong, tmp_path)
    assert "wrong" not in str(caught.value).split("does not answer")[0]
    connect(server.url).config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StreamError, match="eviction policy 'allkeys-lru'"):
        hub(server.url, tmp_path)


def test_d6_o5_the_server_needs_its_password_which_is_nowhere_to_be_seen(server: RedisServer, tmp_path: Path) -> None:
    password = server.url.split("@")[0].removeprefix("redis://:")
    port = int(server.url.split(":")[-1].split("/")[0])
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()
    process = psutil.Process(server.pid)
    assert all(password not in part for part in process.cmdline())
    assert all(password not in value for value in process.environ().values())
    assert {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"} == {"127.0.0.1"}
    for file in (tmp_path / "redis").rglob("*"):
        assert file.is_dir() or password.encode() not in file.read_bytes()


START = """
import sys, threading
from pathlib import Path
from pipelinerl.config.resources import RedisStreams
from pipelinerl.streams.redis_server import RedisServer
server = RedisServer(Path(sys.argv[1]), RedisStreams(backend="redis"))
print(server.pid, flush=True)
threading.Event().wait(60)
"""


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", START, str(tmp_path)], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    server = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("version", "is_good"), [("6.0.16", False), ("5.0.7", False), ("6.2.0", True), ("10.1", True)])
def test_d6_an_old_server_is_refused(version: str, is_good: bool) -> None:
    client = Mock(info=lambda: {"redis_version": version, "maxmemory_policy": "noeviction"})
    if is_good:
        check_server(client, "redis://host:6379/0")
        return
    with pytest.raises(StreamError, match=r"redis://host:6379/0 is version .*, streams need \(6, 2\) or later"):
        check_server(client, "redis://:secret@host:6379/0")
