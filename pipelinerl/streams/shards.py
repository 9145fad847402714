"""What lies in the folder of a stream: shards of lines, an index next to each, repair, and removal of old tokens.

`streams/<topic>/<instance>/<partition>/<first offset>.jsonl`: a shard is named after its first record, so the offset of
every record follows from its shard and line number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.records.codec import check_line, with_checksum
from pipelinerl.rundir.durable import FileLock, replace_file
from pipelinerl.streams.base import StreamSpec

logger = logging.getLogger(__name__)

SHARD_SUFFIX, INDEX_SUFFIX = ".jsonl", ".index"
INDEX_EVERY_BYTES = 1 << 20
LOCK_NAME = "writer.lock"
COMMITTED, STRIPPED = "committed", "stripped"
# Required fields of a sample, so a reader of whole records gets an error instead of an empty sample.
TOKEN_FIELDS = frozenset({"input_ids", "labels", "logprobs", "ref_logprobs"})
_DIGITS = 20
_SHARD_NAME = re.compile(rf"\d{{{_DIGITS}}}\{SHARD_SUFFIX}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_BLOCK_BYTES = 1 << 20


def partition_dir(streams_dir: Path, spec: StreamSpec) -> Path:
    """Folder of a stream below the run's folder `streams`.

    Raises:
        StreamError: a name is not plain (it could leave the folder), or `partition` is negative.
    """
    for field, name in (("topic", spec.topic), ("instance", spec.instance), ("policy", spec.policy or "_")):
        if not _PLAIN_NAME.fullmatch(name):
            raise StreamError(
                f"stream {field} {name!r}: expected letters, digits and _ . + -, not starting with . + or -"
            )
    if spec.partition < 0:
        raise StreamError(f"stream partition {spec.partition}: expected 0 or more")
    return streams_dir / spec.name / spec.instance / str(spec.partition)


def lock_stream(directory: Path) -> FileLock:
    """Create the folder and become its only writer.

    Raises:
        StreamError: it has a writer already, or the folder cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return FileLock(directory / LOCK_NAME)
    except BlockingIOError as error:
        owner = str(error.strerror).removeprefix("locked by ")
        raise StreamError(
            f"{directory}: {owner} is already writing this stream. "
            "A stream has one writer: end the other process first, or use another output_dir"
        ) from error
    except OSError as error:
        raise StreamError(f"stream {directory}: cannot be opened for writing: {error}") from error


def shard_path(directory: Path, first_offset: int) -> Path:
    return directory / f"{first_offset:0{_DIGITS}d}{SHARD_SUFFIX}"


def list_shards(directory: Path) -> list[int]:
    """Return the first offsets of all shards, ascending; empty if the folder does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name.removesuffix(SHARD_SUFFIX)) for name in names if _SHARD_NAME.fullmatch(name))


def shard_of(shards: list[int], offset: int) -> int | None:
    """Return the first offset of the shard that holds (or will hold) `offset`; None if it lies before all shards."""
    index = bisect_right(shards, offset)
    return shards[index - 1] if index else None


def places(directory: Path) -> list[int]:
    """Ascending offsets at which `seek` finds a place, the oldest record's first."""
    found: set[int] = set()
    for first in list_shards(directory):
        shard = shard_path(directory, first)
        with contextlib.suppress(OSError):
            known = _index_entries(shard.with_suffix(INDEX_SUFFIX), shard.stat().st_ino)
            found.update((first, *(first + records for records, _ in known)))
    return sorted(found)


class IndexWriter:
    """Index of the shard that is being written: about every INDEX_EVERY_BYTES a line `records bytes sum`.

    An index is a hint. Its first line is the shard's inode, so that it is never used for a copy, and a shard without a
    valid one is read from its start.
    """

    def __init__(self, shard: Path, shard_fd: int, size: int) -> None:
        self._path = shard.with_suffix(INDEX_SUFFIX)
        self._marked = size
        # Entries beyond the shard's end pointed into a torn tail that was cut off.
        inode = os.fstat(shard_fd).st_ino
        kept = [entry for entry in _index_entries(self._path, inode) if entry[1] <= size]
        lines = [str(inode), *(_index_line(records, position) for records, position in kept)]
        replace_file(self._path, ("\n".join(lines) + "\n").encode("ascii"))

    def wrote(self, records: int, size: int) -> None:
        """The shard now holds `records` records in `size` bytes."""
        if size - self._marked < INDEX_EVERY_BYTES:
            return
        self._marked = size
        # A full disk shows where it matters, in the shard.
        with contextlib.suppress(OSError), self._path.open("a", encoding="ascii") as file:
            file.write(_index_line(records, size) + "\n")


def seek(shard: Path, shard_fd: int, records: int) -> tuple[int, int]:
    """Return (records before it, byte) of the last known place in the shard at or before record number `records`."""
    status = os.fstat(shard_fd)
    best = (0, 0)
    for entry in _index_entries(shard.with_suffix(INDEX_SUFFIX), status.st_ino):
        if best[0] < entry[0] <= records and entry[1] <= status.st_size:
            best = entry
    if best[1] and os.pread(shard_fd, 1, best[1] - 1) != b"\n":
        return 0, 0
    return best


def _index_entries(path: Path, inode: int) -> list[tuple[int, int]]:
    try:
        lines = path.read_text(encoding="ascii").split("\n")[:-1]
    except (OSError, UnicodeDecodeError):
        return []
    if not lines or lines[0] != str(inode):
        return []
    found = []
    for line in lines[1:]:
        numbers = [int(word) for word in line.split(" ") if word.isdecimal()]
        if len(numbers) != 3 or line != _index_line(numbers[0], numbers[1]):
            return []
        found.append((numbers[0], numbers[1]))
    return found


def _index_line(records: int, position: int) -> str:
    return f"{records} {position} {records + position}"


def repair_shard(path: Path) -> tuple[int, int]:
    """Cut off an incomplete last line, and last lines with NUL bytes (data that never reached a disk that lost power).

    Neither was acknowledged as durable. Call it under the stream's lock.

    Returns:
        (number of complete records, size in bytes) of the shard afterwards.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        records, end = _count_records(fd)
        while records:
            start = _line_start(fd, end)
            if b"\x00" not in os.pread(fd, end - start, start):
                break
            records, end = records - 1, start
        if end < size:
            logger.warning("%s: cut off %d bytes of a torn tail after record %d", path, size - end, records)
            os.ftruncate(fd, end)
            os.fsync(fd)
        return records, end
    finally:
        os.close(fd)


def _count_records(fd: int) -> tuple[int, int]:
    """Return (number of newlines, position after the last one)."""
    records = position = end = 0
    while block := os.pread(fd, _BLOCK_BYTES, position):
        if newlines := block.count(b"\n"):
            records += newlines
            end = position + block.rindex(b"\n") + 1
        position += len(block)
    return records, end


def _line_start(fd: int, end: int) -> int:
    """Return where the line that ends (with its newline) at `end` starts."""
    position = end - 1
    while position > 0:
        start = max(0, position - _BLOCK_BYTES)
        found = os.pread(fd, position - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def commit(directory: Path, offset: int) -> None:
    """Note that no resume reads whole records before `offset`."""
    replace_file(directory / COMMITTED, str(offset).encode("ascii"))


def strip_old_shards(directory: Path) -> int:
    """Remove the tokens from shards before the committed offset (`streams.retention=heads`); return how many.

    Ids, versions, rewards, counts and fates stay: only a replay needs tokens. A rewritten shard replaces the old file
    in one step, and a reader that has it open reads on in it. The newest shard is never touched. A shard that cannot be
    rewritten stays as it is, with a warning, and so do those after it.
    """
    committed, begin = _read_number(directory / COMMITTED), _read_number(directory / STRIPPED)
    done = 0
    for first, following in pairwise(list_shards(directory)):
        if first < begin:
            continue
        if following > committed:
            break
        try:
            _strip(shard_path(directory, first))
            replace_file(directory / STRIPPED, str(following).encode("ascii"))
        except (OSError, StreamError, msgspec.DecodeError) as error:
            logger.warning("%s keeps its tokens: %s", shard_path(directory, first), error)
            break
        done += 1
    if done:
        logger.info("%s: removed the tokens from %d old shards", directory, done)
    return done


def _strip(path: Path) -> None:
    draft = path.with_name(f".{path.name}.stripped")
    with path.open("rb") as source, draft.open("wb") as target:
        for line in source:
            check_line(line := line.rstrip(b"\n"))
            record = _without_tokens(msgspec.json.decode(line))
            del record["crc"]
            target.write(with_checksum(msgspec.json.encode(record)) + b"\n")
        target.flush()
        os.fsync(target.fileno())
    draft.replace(path)


def _without_tokens(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tokens(item) for key, item in value.items() if key not in TOKEN_FIELDS}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_tokens(item) for item in value]
    return value


def _read_number(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return 0
