"""Rows of data sets from JSONL files and from the Hugging Face hub, with clear errors. Called by `load_problems` of
domains; waits for the disk or, at the first use of a data set, for the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import DomainError


def read_jsonl(path: Path, domain: str) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line; empty lines are left out.

    Raises:
        DomainError: there is no such file, or a line is something else; names the line.
    """
    try:
        lines = path.expanduser().read_bytes().splitlines()
    except OSError as error:
        raise DomainError(
            f"{domain}: {str(path)!r} cannot be read: {error}. Correct the name of the data set."
        ) from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DomainError(f"{domain}: {path}:{number}: {error}; expected one JSON object a line.") from error
    return rows


def load_hub_rows(path: str, config: str | None, split: str, domain: str) -> list[dict[str, Any]]:
    """Return the rows of a data set on the hub; the `datasets` package keeps it in its cache.

    Raises:
        DomainError: it is not there, the hub cannot be reached and the cache does not have it, or the package is
            missing.
    """
    if find_spec("datasets") is None:
        raise DomainError(f"{domain}: loading {path!r} needs the package datasets. Install pipelinerl[math].")
    import datasets

    try:
        loaded = datasets.load_dataset(path, config, split=split)
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DomainError(
            f"{domain}: the data set {path!r} (config {config!r}, split {split!r}) cannot be loaded: {first_line} "
            "Without access to the hub: load it once on a machine with access and copy its cache (HF_HOME), or save it "
            "as a JSONL file and name that file."
        ) from error
    return [dict(row) for row in loaded]
