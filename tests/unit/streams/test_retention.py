"""Removal of old tokens (`streams.retention=heads`): heads stay, and never another record is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fakes.short_sample import short_sample

from pipelinerl.config.resources import FileStreams
from pipelinerl.errors import StreamError
from pipelinerl.records import SCHEMA_VERSION, Group
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.files import FileReader, FileWriter
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.shards import commit, list_shards, shard_path, strip_old_shards


class GroupHead(msgspec.Struct, kw_only=True):
    id: str
    schema: int = SCHEMA_VERSION


def group(n: int) -> Group:
    sample = short_sample(f"0-{n}/r0/s0", input_ids=[5, 6, 7], labels=[-100, 6, 7], logprobs=[-0.5, -0.5])
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


def test_a_shard_that_cannot_be_read_keeps_its_tokens(tmp_path: Path) -> None:
    writer: FileWriter[Group] = FileWriter(tmp_path, Group, 500, "never")
    for n in range(4):
        writer.write(group(n))
    writer.close()
    shard_path(tmp_path, 0).write_bytes(b"garbage\n")
    commit(tmp_path, 4)
    assert strip_old_shards(tmp_path) == 0
    assert shard_path(tmp_path, 0).read_bytes() == b"garbage\n"
