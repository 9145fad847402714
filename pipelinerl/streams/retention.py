"""Takes the tokens out of old shards, where a run asked for that (`streams.retention=heads`).

Called by the file writer, in a thread, when it begins a new shard. Waits for the disk only. Ids, versions, rewards,
counts and fates stay, so resume, audit and lag accounting work as before; only a replay needs the tokens. A shard is
rewritten when all of its records lie before the committed offset, into a new file that takes the old one's place in one
step: a reader that has the old one open reads on in it. The newest shard is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.streams.layout import list_shards, shard_path

logger = logging.getLogger(__name__)

COMMITTED, STRIPPED = "committed", "stripped"
# Required fields of a sample, so a reader that wants the whole record is refused and never takes it for an empty one.
TOKEN_FIELDS = frozenset({"input_ids", "labels", "logprobs", "ref_logprobs"})


def commit(directory: Path, offset: int) -> None:
    """Note that no resume will read whole records before `offset`."""
    _write_number(directory / COMMITTED, offset)


def strip_old_shards(directory: Path) -> int:
    """Strip the shards that lie before the committed offset and have not been yet; returns how many were.

    One that cannot be read or rewritten stays as it is, with a warning, and so do those behind it.
    """
    committed, begin = _read_number(directory / COMMITTED), _read_number(directory / STRIPPED)
    shards = list_shards(directory)
    done = 0
    for first, following in pairwise(shards):
        if first < begin:
            continue
        if following > committed:
            break
        try:
            _strip(shard_path(directory, first))
            _write_number(directory / STRIPPED, following)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s keeps its tokens: %s", shard_path(directory, first), error)
            break
        done += 1
    if done:
        logger.info("%s: took the tokens out of %d old shards", directory, done)
    return done


def _strip(path: Path) -> None:
    draft = path.with_name(f".{path.name}.stripped")
    with path.open("rb") as source, draft.open("wb") as target:
        for line in source:
            target.write(msgspec.json.encode(_without_tokens(msgspec.json.decode(line))) + b"\n")
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


def _write_number(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(str(number), encoding="ascii")
    draft.replace(path)
