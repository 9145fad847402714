"""What a writer does to its last shard before it appends: count the records and cut off a torn tail.

Called by the file writer when it opens a stream, under the stream's lock. A process that was killed inside a write
leaves a last line without its newline; a machine that lost power may leave NUL bytes where data never reached the
disk. Neither was ever acknowledged as durable, so both are cut off, and the records before them stay.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


def repair_shard(path: Path) -> tuple[int, int]:
    """Cut off an incomplete last line, and last lines that hold NUL bytes.

    Returns:
        (number of complete records, size in bytes) of the shard afterwards.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        records, end = _count_records(fd)
        records, end = _without_nul_lines(fd, records, end)
        if end < size:
            logger.warning("%s: cut off %d bytes of a torn tail behind record %d", path, size - end, records)
            os.ftruncate(fd, end)
            os.fsync(fd)
        return records, end
    finally:
        os.close(fd)


def _count_records(fd: int) -> tuple[int, int]:
    """Return (number of newlines, position behind the last one)."""
    records = position = end = 0
    while block := os.pread(fd, _BLOCK_BYTES, position):
        newlines = block.count(b"\n")
        if newlines:
            records += newlines
            end = position + block.rindex(b"\n") + 1
        position += len(block)
    return records, end


def _without_nul_lines(fd: int, records: int, end: int) -> tuple[int, int]:
    while records:
        start = _line_start(fd, end)
        if b"\x00" not in os.pread(fd, end - start, start):
            break
        records, end = records - 1, start
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
