"""Problems for the built-in domains: drawn into disjoint splits, or read from JSONL files and the Hugging Face hub."""

from __future__ import annotations

import codecs
import hashlib
import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import DomainError

SPLITS = ("train", "test")
# Every 5th problem, by the hash of its content, is a test problem.
_TEST_SHARE = 5
_MAX_TRIES_PER_PROBLEM = 200

Problem = dict[str, Any]


def check_names(domain: str, names: Sequence[str], known: Sequence[str] = SPLITS) -> None:
    """Refuse unknown data sets.

    Raises:
        DomainError: names them.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DomainError(
            f"{domain}: unknown data sets {unknown}, expected some of {list(known)}. "
            "Change train_dataset_names or test_dataset_names."
        )


def optional(package: str, domain: str, extra: str) -> Any:
    """Import a package, or a module of one, that comes with `pipelinerl[extra]`.

    Raises:
        DomainError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DomainError(
            f"{domain}: the package {package.partition('.')[0]} is needed: {error}. Install pipelinerl[{extra}] (in a "
            f"checkout: pip install -e '.[{extra}]'), or start another experiment, such as --config-name guessing."
        ) from error


def draw_problems(
    domain: str,
    names: Sequence[str],
    sizes: tuple[int, int],
    seed: int,
    draw: Callable[[random.Random], tuple[str, Problem]],
    fault_of: Callable[[Problem], str | None] | None = None,
) -> list[Problem]:
    """Return different problems of each named split, and the rows of JSONL files.

    Args:
        sizes: number of problems of `train` and of `test`.
        draw: makes one problem, with a text that tells it from all others; that text decides the split.
        fault_of: says what is wrong with the row of a file; None: the domain has no files.

    Raises:
        DomainError: a name is unknown, `draw` knows too few different problems, or a row has a fault.
    """
    problems: list[Problem] = []
    for name in map(str, names):
        if fault_of is not None and name.endswith(".jsonl"):
            for index, row in enumerate(read_jsonl(Path(name), domain)):
                if (fault := fault_of(row)) is not None:
                    raise DomainError(f"{domain}: {name}:{index + 1}: {fault}. Correct the line.")
                problems.append({"dataset": Path(name).stem, **row})
            continue
        check_names(domain, [name])
        size = sizes[SPLITS.index(name)]
        rng = random.Random(f"{domain}/{name}/{seed}")
        found: dict[str, Problem] = {}
        for _ in range(size * _MAX_TRIES_PER_PROBLEM):
            if len(found) == size:
                break
            key, problem = draw(rng)
            digest = hashlib.blake2b(f"{domain}/{key}".encode(), digest_size=8).digest()
            if (digest[0] % _TEST_SHARE == 0) == (name == "test") and key not in found:
                found[key] = {"id": f"{domain}-{digest.hex()}", "dataset": name, **problem}
        if len(found) < size:
            raise DomainError(
                f"{domain}: found only {len(found)} different problems for {name!r}, {size} are wanted. "
                "Change dataset_loader_params: fewer problems, or larger ones."
            )
        problems.extend(found.values())
    return problems


def read_jsonl(path: Path, key: str) -> list[dict[str, Any]]:
    """Return the rows of a file with one JSON object per line, or with one JSON list of objects. Skips empty lines.

    The file is UTF-8, with or without a byte order mark; only a line feed ends a line.

    Args:
        path: of the file.
        key: configuration key or domain that named the file, for messages.

    Raises:
        DomainError: there is no such file, or a row is something else; names the line.
    """
    try:
        content = path.expanduser().read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DomainError(f"{key}: cannot read {str(path)!r}: {error}. Correct the name of the data set.") from None
    if content.lstrip().startswith(b"["):
        try:
            return msgspec.json.decode(content, type=list[dict[str, Any]])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DomainError(f"{key}: {path}: {error}; expected a list of JSON objects.") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DomainError(f"{key}: {path}:{number}: {error}; expected one JSON object per line.") from error
    return rows


def load_hub_rows(
    path: str, config: str | None, split: str, key: str, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a data set on the hub, at most the first `limit`; the `datasets` package caches it.

    Args:
        path: name of the data set.
        config: its configuration, if it has several.
        split: for instance `train`.
        key: configuration key or domain that named it, for messages.
        limit: number of rows; None: all.

    Raises:
        DomainError: it does not exist, the hub cannot be reached and the cache does not have it, or the package is
            missing.
    """
    datasets = optional("datasets", key, "math")
    try:
        loaded = datasets.load_dataset(path, config, split=split)
    except Exception as error:  # "not there", "no network" and "no such split" have no common base
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DomainError(
            f"{key}: cannot load the data set {path!r} (config {config!r}, split {split!r}): {first_line} "
            "Without access to the hub: load it once on a machine with access and copy its cache (HF_HOME), or save it "
            "as a JSONL file and name that file."
        ) from error
    if limit is not None:
        loaded = loaded.select(range(min(limit, len(loaded))))
    return [dict(row) for row in loaded]
