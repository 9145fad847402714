"""Where the shards of a stream lie: `streams/<topic>/<instance>/<partition>/<first offset>.jsonl`.

Called by the file reader and the file writer. The name of a shard carries the offset of its first record, so the
offset of every record follows from its shard and its line number, and a reader finds the shard of an offset by name.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from pathlib import Path

from pipelinerl.errors import StreamError
from pipelinerl.streams.base import StreamSpec

SHARD_SUFFIX = ".jsonl"
_DIGITS = 20
_SHARD_NAME = re.compile(rf"\d{{{_DIGITS}}}\{SHARD_SUFFIX}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def check_spec(spec: StreamSpec) -> None:
    """Refuse names that would leave the stream's folder or mix with another stream's.

    Raises:
        StreamError: `topic` or `instance` is not a plain name, or `partition` is negative.
    """
    for field, name in (("topic", spec.topic), ("instance", spec.instance)):
        if not _PLAIN_NAME.fullmatch(name):
            raise StreamError(
                f"stream {field} {name!r}: expected letters, digits and _ . + -, not starting with . + or -"
            )
    if spec.partition < 0:
        raise StreamError(f"stream partition {spec.partition}: expected 0 or more")


def partition_dir(streams_dir: Path, spec: StreamSpec) -> Path:
    return streams_dir / spec.topic / spec.instance / str(spec.partition)


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
