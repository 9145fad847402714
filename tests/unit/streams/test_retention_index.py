"""The index beside a shard and the removal of old tokens: hints and heads, never another record."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from pipelinerl.config.resources import FileStreams
from pipelinerl.errors import StreamError
from pipelinerl.records import SCHEMA_VERSION, Group, MetricRecord, Sample, VersionSpan
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams import shards
from pipelinerl.streams.files import FileReader, FileWriter
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.shards import commit, list_shards, shard_path, strip_old_shards


class GroupHead(msgspec.Struct, kw_only=True):
    id: str
    schema: int = SCHEMA_VERSION


def record(n: int) -> MetricRecord:
    return MetricRecord(source="x" * 50, step=n, time=0.0, values={})


def write(directory: Path, count: int) -> None:
    writer: FileWriter[MetricRecord] = FileWriter(directory, MetricRecord, 10**9, "never")
    for _ in range(count):
        writer.write(record(writer.next_offset))
    writer.close()


def steps(directory: Path, offset: int) -> list[int]:
    reader: FileReader[MetricRecord] = FileReader(directory, MetricRecord, offset)
    found = []
    while entries := reader.read(0):
        found += [entry.record.step for entry in entries]
    reader.close()
    return found


@pytest.fixture(autouse=True)
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "INDEX_EVERY_BYTES", 300)


def place(directory: Path, records: int) -> tuple[int, int]:
    fd = os.open(shard_path(directory, 0), os.O_RDONLY)
    try:
        return shards.seek(shard_path(directory, 0), fd, records)
    finally:
        os.close(fd)


def test_a_reader_starts_at_the_last_place_before_its_offset(tmp_path: Path) -> None:
    write(tmp_path, 40)
    for offset in range(41):
        assert steps(tmp_path, offset) == list(range(offset, 40))
        records, position = place(tmp_path, offset)
        assert offset - 5 <= records <= offset
        assert shard_path(tmp_path, 0).read_bytes()[:position].count(b"\n") == records


@pytest.mark.parametrize("cut", [1, 100, 1000, 3000])
def test_a_torn_tail_takes_the_places_behind_it_along(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 40)
    path = shard_path(tmp_path, 0)
    os.truncate(path, path.stat().st_size - cut)
    left = path.read_bytes().count(b"\n")
    write(tmp_path, 30)
    assert [steps(tmp_path, n) for n in range(left + 30)] == [list(range(n, left + 30)) for n in range(left + 30)]


@pytest.mark.parametrize("text", ["", "garbage", "{inode}\n1 2", "{inode}\n3 5 9\n", "7\n1 96 97\n"])
def test_an_index_that_does_not_fit_is_passed_over(tmp_path: Path, text: str) -> None:
    write(tmp_path, 10)
    path = shard_path(tmp_path, 0)
    path.with_suffix(".index").write_text(text.replace("{inode}", str(path.stat().st_ino)))
    assert place(tmp_path, 9) == (0, 0)
    assert steps(tmp_path, 5) == [5, 6, 7, 8, 9]


def test_a_copied_stream_is_read_without_its_index(tmp_path: Path) -> None:
    write(tmp_path / "a", 40)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert place(tmp_path / "b", 39) == (0, 0)
    assert steps(tmp_path / "b", 33) == list(range(33, 40))
    write(tmp_path / "b", 40)
    assert place(tmp_path / "b", 79)[0] > 40
    assert steps(tmp_path / "b", 70) == list(range(70, 80))


def group(n: int) -> Group:
    sample = Sample(
        id=f"0-{n}/r0/s0",
        group_id=f"0-{n}",
        rollout_id=f"0-{n}/r0",
        input_ids=[5, 6, 7],
        labels=[-100, 6, 7],
        logprobs=[-0.5, -0.5],
        reward=1.0,
        finished=True,
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=2,
        version_spans=[VersionSpan(3, 0, 2)],
    )
    return Group(id=f"0-{n}", problem_id="p", dataset_name="d", samples=[sample], rollouts=[])


def test_tokens_go_where_no_resume_needs_them_and_heads_stay(tmp_path: Path) -> None:
    hub = StreamHub(FileStreams(retention="heads", shard_bytes=1000), RunDir(tmp_path), "run")
    directory = tmp_path / "streams/actor/actor_0/0"
    writer = hub.writer("actor", "actor_0", Group)
    for n in range(10):
        writer.write(group(n))
    writer.close()
    firsts = list_shards(directory)
    assert len(firsts) >= 3
    first = FileReader[Group](directory, Group)
    assert len(first.read(0, max_records=1)) == 1  # it has the first shard open
    hub.commit("actor", "actor_0", firsts[2])
    writer = hub.writer("actor", "actor_0", Group)
    while len(list_shards(directory)) == len(firsts):
        writer.write(group(writer.next_offset))  # type: ignore[attr-defined]
    writer.close()
    total = writer.next_offset  # type: ignore[attr-defined]
    assert [entry.record.id for entry in hub.reader("actor", "actor_0", Group, firsts[2]).read(60, 100)] == [
        f"0-{n}" for n in range(firsts[2], total)
    ]
    heads = hub.reader("actor", "actor_0", GroupHead)
    found: list[str] = []
    while entries := heads.read(0):
        found += [entry.record.id for entry in entries]
    assert found == [f"0-{n}" for n in range(total)]
    with pytest.raises(StreamError, match=r"offset 0: the tokens of this Group were removed \(streams.retention=heads"):
        hub.reader("actor", "actor_0", Group).read(0)
    assert first.read(0, max_records=1)[0].record == group(1)
    assert strip_old_shards(directory) == 0


def test_by_default_nothing_goes(tmp_path: Path) -> None:
    hub = StreamHub(FileStreams(shard_bytes=1000), RunDir(tmp_path), "run")
    hub.commit("actor", "actor_0", 10)
    writer = hub.writer("actor", "actor_0", Group)
    for n in range(10):
        writer.write(group(n))
    writer.close()
    entries = []
    reader = hub.reader("actor", "actor_0", Group)
    while got := reader.read(0):
        entries += got
    assert [entry.record for entry in entries] == [group(n) for n in range(10)]


def test_a_shard_that_cannot_be_read_keeps_its_tokens(tmp_path: Path) -> None:
    writer: FileWriter[Group] = FileWriter(tmp_path, Group, 500, "never")
    for n in range(4):
        writer.write(group(n))
    writer.close()
    shard_path(tmp_path, 0).write_bytes(b"garbage\n")
    commit(tmp_path, 4)
    assert strip_old_shards(tmp_path) == 0
    assert shard_path(tmp_path, 0).read_bytes() == b"garbage\n"
