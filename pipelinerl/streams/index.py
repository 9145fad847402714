"""Where records lie in a shard: a few lines beside it, so that a reader that starts late need not read it all.

Written by the file writer, read by the file reader. An index is a hint: it is used only for the very file that it was
made for (its inode is the first line), only at the end of a line, and a shard without one is read from its start.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pipelinerl.streams.layout import list_shards, shard_path

EVERY_BYTES = 1 << 20
SUFFIX = ".index"


class IndexWriter:
    """The index of the shard that is being written: a line every EVERY_BYTES or so, records, bytes and their sum."""

    def __init__(self, shard: Path, shard_fd: int, size: int) -> None:
        self._path = shard.with_suffix(SUFFIX)
        self._marked = size
        # What a torn tail left behind must not be pointed at, so the entries behind the shard's end go first.
        inode = os.fstat(shard_fd).st_ino
        kept = [entry for entry in _entries(self._path, inode) if entry[1] <= size]
        lines = [str(inode), *(_line(records, position) for records, position in kept)]
        draft = self._path.with_name(f".{self._path.name}")
        draft.write_text("\n".join(lines) + "\n", encoding="ascii")
        draft.replace(self._path)

    def wrote(self, records: int, size: int) -> None:
        """The shard holds `records` records in `size` bytes now."""
        if size - self._marked < EVERY_BYTES:
            return
        self._marked = size
        # A full disk shows where it matters, in the shard.
        with contextlib.suppress(OSError), self._path.open("a", encoding="ascii") as file:
            file.write(_line(records, size) + "\n")


def seek(shard: Path, shard_fd: int, records: int) -> tuple[int, int]:
    """Return (records before it, byte) of the last known place in the shard at or before record number `records`."""
    status = os.fstat(shard_fd)
    best = (0, 0)
    for entry in _entries(shard.with_suffix(SUFFIX), status.st_ino):
        if best[0] < entry[0] <= records and entry[1] <= status.st_size:
            best = entry
    if best[1] and os.pread(shard_fd, 1, best[1] - 1) != b"\n":
        return 0, 0
    return best


def places(directory: Path) -> list[int]:
    """Ascending offsets in the shards of `directory` at which `seek` finds a place, the oldest record's first."""
    found: set[int] = set()
    for first in list_shards(directory):
        shard = shard_path(directory, first)
        with contextlib.suppress(OSError):
            known = _entries(shard.with_suffix(SUFFIX), shard.stat().st_ino)
            found.update((first, *(first + records for records, _ in known)))
    return sorted(found)


def _entries(path: Path, inode: int) -> list[tuple[int, int]]:
    try:
        lines = path.read_text(encoding="ascii").split("\n")[:-1]
    except (OSError, UnicodeDecodeError):
        return []
    if not lines or lines[0] != str(inode):
        return []
    found = []
    for line in lines[1:]:
        numbers = [int(word) for word in line.split(" ") if word.isdecimal()]
        if len(numbers) != 3 or line != _line(numbers[0], numbers[1]):
            return []
        found.append((numbers[0], numbers[1]))
    return found


def _line(records: int, position: int) -> str:
    return f"{records} {position} {records + position}"
