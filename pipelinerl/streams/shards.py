"""The folder of a stream: shards of lines, their repair, and the removal of old tokens.

`streams/<topic>/<instance>/0/<first offset>.jsonl`: a shard is named after its first record, so shard and line number
give the offset of a record. The file `newest` names the last shard that was started, so that its deletion is noticed.
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
from pipelinerl.rundir.durable import replace_file
from pipelinerl.streams.base import StreamSpec

logger = logging.getLogger(__name__)

COMMITTED, STRIPPED, NEWEST = "committed", "stripped", "newest"
# Required fields of a sample, so that a reader of whole records gets an error instead of an empty sample.
TOKEN_FIELDS = frozenset({"input_ids", "labels", "logprobs", "ref_logprobs"})
_SHARD_NAME = re.compile(r"\d{20}\.jsonl")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def stream_dir(streams_dir: Path, spec: StreamSpec) -> Path:
    """Folder of a stream in the run's folder `streams`. StreamError: a name could leave that folder."""
    for name in (spec.topic, spec.instance, spec.policy or "_"):
        if not _PLAIN_NAME.fullmatch(name):
            raise StreamError(f"stream name {name!r}: expected letters, digits and _ . + -, not starting with . + or -")
    return streams_dir / spec.name / spec.instance / "0"


def shard_path(directory: Path, first_offset: int) -> Path:
    return directory / f"{first_offset:020d}.jsonl"


def list_shards(directory: Path) -> list[int]:
    """Return the first offsets of all shards, ascending; empty if the folder does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[:20]) for name in names if _SHARD_NAME.fullmatch(name))


def shard_of(shards: list[int], offset: int) -> int | None:
    """Return the first offset of the shard that holds (or will hold) `offset`; None if it lies before all shards."""
    index = bisect_right(shards, offset)
    return shards[index - 1] if index else None


def note_newest(directory: Path, first_offset: int) -> None:
    """Note that this shard was started. Call it once the shard is there."""
    replace_file(directory / NEWEST, str(first_offset).encode("ascii"))


def lost_shard(directory: Path) -> int | None:
    """Return the first offset of the newest shard if that shard is gone; None if nothing is known to be missing."""
    newest = _read_number(directory / NEWEST, -1)
    return newest if newest >= 0 and not shard_path(directory, newest).exists() else None


def repair_shard(path: Path) -> tuple[int, int]:
    """Cut off an incomplete last line, and last lines with NUL bytes (data that never reached a disk that lost power).

    Neither was acknowledged as durable. Call it under the stream's lock.

    Returns:
        (number of complete records, size in bytes) of the shard afterwards.
    """
    records = position = 0
    kept = (0, 0)
    with path.open("r+b") as file:
        for line in file:
            records, position = records + 1, position + len(line)
            if line.endswith(b"\n") and b"\x00" not in line:
                kept = (records, position)
        if kept[1] < position:
            logger.warning("%s: cut off %d bytes of a torn tail after record %d", path, position - kept[1], kept[0])
            file.truncate(kept[1])
            os.fsync(file.fileno())
    return kept


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


def _read_number(path: Path, default: int = 0) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return default
