"""What is special to streams in files: layout, torn tails, corrupt lines, missing shards, failing disks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from fakes.short_sample import encode

from pipelinerl.config.resources import FileStreams
from pipelinerl.errors import StreamError
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams import files
from pipelinerl.streams.files import FileReader, FileWriter
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import read_entries
from pipelinerl.streams.shards import list_shards, repair_shard


def record(n: int) -> MetricRecord:
    return MetricRecord(source="s", step=n, time=0.0, values={})


LINE = encode(record(0)) + b"\n"  # every record with a one-digit step is as long


def open_writer(directory: Path, shard_bytes: int = 10**6) -> FileWriter[MetricRecord]:
    return FileWriter(directory, MetricRecord, shard_bytes, "never")


def open_reader(directory: Path, offset: int = 0) -> FileReader[MetricRecord]:
    return FileReader(directory, MetricRecord, offset)


def shard(directory: Path, first: int = 0) -> Path:
    return directory / f"{first:020d}.jsonl"


def write(directory: Path, count: int, shard_bytes: int = 10**6) -> None:
    writer = open_writer(directory, shard_bytes)
    for _ in range(count):
        writer.write(record(writer.next_offset))
    writer.close()


def read_steps(reader: FileReader[MetricRecord]) -> list[int]:
    return [entry.record.step for entry in reader.read(0)]


def test_a_stream_lies_where_the_design_says(tmp_path: Path) -> None:
    hub = StreamHub(FileStreams(shard_bytes=2 * len(LINE)), RunDir(tmp_path), "r")
    writer = hub.writer("actor", "actor_0", MetricRecord)
    for n in range(5):
        writer.write(record(n))
    folder = tmp_path / "streams/actor/actor_0/0"
    assert list_shards(folder) == [0, 2, 4]
    assert shard(folder, 2).read_bytes() == encode(record(2)) + b"\n" + encode(record(3)) + b"\n"


def test_a_record_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, 3, shard_bytes=1)
    assert list_shards(tmp_path) == [0, 1, 2]
    assert read_steps(open_reader(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "-x", "x\n"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "r")
    with pytest.raises(StreamError, match="expected letters"):
        hub.writer(name, "a", MetricRecord)
    with pytest.raises(StreamError, match="expected letters"):
        hub.reader("actor", name, MetricRecord)


def test_d3_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    StreamHub(FileStreams(), RunDir(tmp_path), "one")
    StreamHub(FileStreams(), RunDir(tmp_path), "one")
    with pytest.raises(StreamError, match=r"streams of run 'one', this is run 'two'.*force_restart"):
        StreamHub(FileStreams(), RunDir(tmp_path), "two")
    assert [path.name for path in (tmp_path / "streams").iterdir()] == ["run_id"]


@pytest.mark.parametrize("cut", range(1, len(LINE)))
def test_d5_a_line_torn_at_any_byte_is_waited_for_and_then_cut_off(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 2)
    os.truncate(shard(tmp_path), 2 * len(LINE) - cut)
    reader = open_reader(tmp_path)
    assert read_steps(reader) == [0]
    assert read_steps(reader) == []
    writer = open_writer(tmp_path)
    assert writer.write(record(5)) == 1
    assert read_steps(reader) == [5]
    assert shard(tmp_path).stat().st_size == 2 * len(LINE)
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    "tail", [b"\x00" * 5000, b"\x00" * 7 + b"\n", b'{"so' + b"\x00" * 9 + b'"}\n', b"\x00\n\x00\n"]
)
def test_d5_a_tail_of_nul_bytes_is_cut_off_by_the_writer(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, 2)
    with shard(tmp_path).open("ab") as file:
        file.write(tail)
    assert open_writer(tmp_path).write(record(2)) == 2
    assert read_steps(open_reader(tmp_path)) == [0, 1, 2]


def test_repair_of_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    long = b"x" * (3 << 20)
    path.write_bytes(b"a\n" + long + b"\n" + long)
    assert repair_shard(path) == (2, 2 + len(long) + 1)
    path.write_bytes(b"a\n" + b"\x00" * (3 << 20) + b"\n")
    assert repair_shard(path) == (1, 2)


def test_d5_a_corrupt_line_in_the_middle_is_reported_with_file_offset_and_reason(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with shard(tmp_path).open("r+b") as file:
        file.seek(2 * len(LINE) + 3)
        file.write(b"\x00\x00")
    reader = open_reader(tmp_path)
    assert read_steps(reader) == [0, 1]
    for _ in range(2):
        with pytest.raises(StreamError, match=rf"{shard(tmp_path)} at byte {2 * len(LINE)}, offset 2: damaged"):
            reader.read(0)
    assert read_steps(open_reader(tmp_path, offset=3)) == [3]


def test_a_corrupt_line_that_changed_on_disk_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, 2)
    reader = open_reader(tmp_path)
    assert len(reader.read(0, max_records=1)) == 1
    reader._lines[0] = b"\x00" * (len(LINE) - 1)
    assert read_steps(reader) == [1]


def test_a_missing_shard_is_reported(tmp_path: Path) -> None:
    write(tmp_path, 6, shard_bytes=2 * len(LINE))
    shard(tmp_path, 2).unlink()
    reader = open_reader(tmp_path)
    assert read_steps(reader) == [0, 1]
    with pytest.raises(StreamError, match="offset 2: the record is missing, but the shard of offset 4 exists"):
        reader.read(0.5)


@pytest.mark.parametrize("lost", [(4,), (2, 4), (0, 2, 4)])
def test_a_newest_shard_that_is_gone_is_missed_by_readers_and_the_next_writer(
    tmp_path: Path, lost: tuple[int, ...]
) -> None:
    write(tmp_path, 6, shard_bytes=2 * len(LINE))
    for first in lost:
        shard(tmp_path, first).unlink()
    reader = open_reader(tmp_path)
    if lost[0]:
        assert read_steps(reader) == list(range(lost[0]))
    with pytest.raises(StreamError, match=f"{4:020d}.jsonl, is gone"):
        reader.read(0)
    with pytest.raises(StreamError, match=f"{4:020d}.jsonl, is gone"):
        open_writer(tmp_path)
    assert list_shards(tmp_path) == [first for first in (0, 2, 4) if first not in lost]


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_a_shard_that_is_deleted_while_it_is_written_ends_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(files, "LOOK_S", 0.0)
    writer = open_writer(tmp_path)
    writer.write(record(0))
    shard(tmp_path).unlink()
    with pytest.raises(StreamError, match="was deleted while it was written"):
        writer.write(record(1)) if call == "write" else getattr(writer, call)()
    writer.close()
    with pytest.raises(StreamError, match="is gone"):
        open_writer(tmp_path)


def test_an_offset_before_the_oldest_shard_is_reported(tmp_path: Path) -> None:
    write(tmp_path, 6, shard_bytes=2 * len(LINE))
    shard(tmp_path, 0).unlink()
    with pytest.raises(StreamError, match="offset 1: the record was removed; the oldest one left is 2"):
        open_reader(tmp_path, offset=1).read(0)
    assert read_steps(open_reader(tmp_path, offset=2)) == [2, 3, 4, 5]


def test_a_shortened_shard_is_reported(tmp_path: Path) -> None:
    write(tmp_path, 3)
    reader = open_reader(tmp_path)
    assert read_steps(reader) == [0, 1, 2]
    os.truncate(shard(tmp_path), len(LINE))
    with pytest.raises(StreamError, match="shorter"):
        reader.read(0)


def test_o1_a_full_disk_is_a_stream_error_and_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path)
    writer.write(record(0))
    real_write = os.write
    calls = 0

    def half_then_full(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[:10])

    monkeypatch.setattr(files.os, "write", half_then_full)
    with pytest.raises(StreamError, match=r"offset 1 cannot be written.*No space left"):
        writer.write(record(1))
    monkeypatch.undo()
    assert shard(tmp_path).read_bytes() == LINE
    assert writer.write(record(2)) == 1
    assert read_steps(open_reader(tmp_path)) == [0, 2]


def test_o1_a_shard_that_cannot_be_begun_is_begun_by_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    writer = open_writer(tmp_path, shard_bytes=len(LINE))
    writer.write(record(0))
    shard(tmp_path, 1).mkdir()
    with pytest.raises(StreamError, match="offset 1 cannot be written"):
        writer.write(record(1))
    shard(tmp_path, 1).rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", full)
        with pytest.raises(StreamError, match="no space"):
            writer.write(record(1))
    assert shard(tmp_path, 0).read_bytes() == LINE
    writer.write(record(1))
    writer.write(record(2))
    assert list_shards(tmp_path) == [0, 1, 2]
    assert read_steps(open_reader(tmp_path)) == [0, 1, 2]
    writer.close()


def test_o1_a_failed_fsync_ends_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer: FileWriter[MetricRecord] = FileWriter(tmp_path, MetricRecord, 10**6, "always")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pipelinerl.rundir.durable.os.fdatasync", fail)
    for _ in range(2):
        with pytest.raises(StreamError, match="forced to the disk"):
            writer.write(record(0))


def test_o1_a_folder_that_cannot_be_written_is_a_stream_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StreamError, match="cannot be opened for writing"):
        open_writer(tmp_path / "file" / "x")
    with pytest.raises(StreamError, match="cannot hold streams"):
        StreamHub(FileStreams(), RunDir(tmp_path / "file"), "r")


def test_a_folder_that_cannot_be_watched_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.EMFILE, "too many inotify instances")

    monkeypatch.setattr("pipelinerl.streams.waiting.INotify", full)
    reader = open_reader(tmp_path)
    threading.Timer(0.1, lambda: write(tmp_path, 1)).start()
    assert len(reader.read(60)) == 1


def test_reading_what_is_there_creates_nothing(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "none")
    assert read_steps(reader) == []
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_found_again_without_a_walk_through_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MARK_BYTES", 1000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "r")
    writer = hub.writer("actor", "actor_0", MetricRecord)
    for n in range(500):
        writer.write(record(n))
    assert [entry.record.step for entry in read_entries(hub, "actor", "actor_0", MetricRecord)] == list(range(500))
    positions = []
    pread = os.pread

    def noted(fd: int, size: int, position: int) -> bytes:
        positions.append(position)
        return pread(fd, size, position)

    monkeypatch.setattr(os, "pread", noted)
    for offset in (0, 1, 77, 450, 499):
        positions.clear()
        (entry,) = read_entries(hub, "actor", "actor_0", MetricRecord, offset, offset + 1)
        assert (entry.offset, entry.record.step) == (offset, offset)
        assert len(positions) <= 4
    writer.write(record(500))
    assert [entry.record.step for entry in read_entries(hub, "actor", "actor_0", MetricRecord, 500)] == [500]
    writer.close()
