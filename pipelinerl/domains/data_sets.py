"""Data sets from wherever they are: files, folders, the Hugging Face hub. Their rows become a domain's problems.

A data set is named by a text: a known name (`shapes.KNOWN`), the path of a file or folder, a URL, or
`owner/name[@revision][:subset][:split]` on the hub. Or by a mapping with the fields of `DataSet`.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import importlib.util
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pipelinerl.domains.data import SPLITS, Draw, Problem, draw_problems, missing_package, optional
from pipelinerl.domains.shapes import (
    KNOWN,
    MISSING,
    SHAPES,
    Row,
    field_names,
    fit,
    has_several_questions,
    lookup,
    map_of,
)
from pipelinerl.errors import DomainError

logger = logging.getLogger(__name__)

_JSON_SUFFIXES = (".jsonl", ".json")
#: Other files, with the reader of the package `datasets` for each.
_READERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_REMOTE = ("https://", "http://", "hf://")
_COMPARISONS = ("not", "contains", "min", "max")
_KEYS = "train_dataset_names or test_dataset_names"


class DataSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set.

    `path`: file, folder, URL or name on the hub; empty: `name` is a known one, or made by the domain.
    `name`: under which metrics are grouped.
    `subset`, `split`, `revision`: as the package `datasets` has them.
    `answers`: another file with a row for each `id`, whose fields are added.
    `fields`: the user's map from a domain's fields to paths in the rows.
    `filter`: path -> value, list of values, or {not, contains, min, max}: rows without these are left out.
    `limit`: at most so many rows, after the filter.
    `share`: how often its problems are drawn, relative to the other data sets; None: as often as those of any other.
    """

    path: str = ""
    name: str = ""
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    answers: str | None = None
    fields: dict[str, str] = {}
    filter: dict[str, Any] = {}
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    share: Annotated[float, msgspec.Meta(gt=0, lt=1e12)] | None = None

    @property
    def is_made(self) -> bool:
        """Whether the domain makes it."""
        return not self.path


def data_set(given: Any, domain: str, known: Mapping[str, Any] | None = None, made: Sequence[str] = ()) -> DataSet:
    """Return the data set that a user named.

    Args:
        given: a text or a mapping.
        domain: for messages.
        known: data sets by name; None: any name may be one on the hub.
        made: names of those that the domain makes.

    Raises:
        DomainError: the name is unknown, or the mapping has other keys or values.
    """
    if isinstance(given, Mapping):
        try:
            own = msgspec.convert(dict(given), DataSet)
        except msgspec.ValidationError as error:
            raise DomainError(
                f"{domain}: the data set {dict(given)!r}: {error}. Expected a mapping of "
                f"{', '.join(DataSet.__struct_fields__)}. Change {_KEYS}."
            ) from error
        # What the mapping does not say is as the name or the path has it.
        base = data_set(own.path or own.name, domain, known, made)
        said = {key: getattr(own, key) for key in given if key != "path"}
        return _without_idle_keys(msgspec.structs.replace(base, **{"name": own.name or base.name, **said}), domain)
    name = str(given)
    if name in made:
        return DataSet(name=name)
    if known is not None and name in known:
        return msgspec.structs.replace(data_set(known[name], domain), name=name)
    if name.startswith(_REMOTE):
        return DataSet(path=name, name=Path(name).stem)
    with_split = _SPLIT.fullmatch(name)
    if with_split is not None and Path(with_split[1]).expanduser().exists():
        return DataSet(path=with_split[1], name=Path(with_split[1]).stem, split=with_split[2])
    if (local := _local(name)) is not None:
        return DataSet(path=name, name=local.stem)
    front, split = with_split.groups() if with_split is not None else (name, None)
    place, _, subset = front.partition(":")
    path, _, revision = place.partition("@")
    if not path or (known is not None and path.count("/") != 1):
        raise DomainError(_unknown(name, domain, [*made, *(known or ())]))
    return DataSet(path=path, name=name, subset=subset or None, split=split, revision=revision or None)


def _without_idle_keys(source: DataSet, domain: str) -> DataSet:
    """Return the data set, unless it says what has no effect on it."""
    local, idle = _local(source.path), set[str]()
    if source.is_made:
        idle = {"subset", "split", "revision", "answers", "fields", "filter"}
    elif source.path.startswith(_REMOTE) or (local is not None and not local.is_dir()):
        idle = {"subset", "split", "revision"}
    elif local is not None:
        idle = {"revision"}
    if found := sorted(key for key in idle if getattr(source, key)):
        raise DomainError(
            f"{domain}: {', '.join(found)} of the data set {source.name!r} can have no effect: "
            f"{'it is made by the domain' if source.is_made else f'{source.path} has none'}. Leave it out."
        )
    return source


#: A name, and a split of the package `datasets`, such as train or test[:100].
_SPLIT = re.compile(r"(.+?):([\w.-]+(?:\[[^\[\]]*\])?)")


def _unknown(name: str, domain: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return (
        f"{domain}: unknown data set {name!r}. {hint}Expected one of {', '.join(names)}; the path of a .jsonl, .json, "
        ".parquet or .csv file or of a folder of save_to_disk; or owner/name[@revision][:subset][:split] of one on the "
        f"hub. Change {_KEYS}."
    )


def _local(path: str) -> Path | None:
    """Return the file or folder on this machine that `path` means, whether it is there or not; None: it means none."""
    if not path or path.startswith(_REMOTE):
        return None
    file = Path(path).expanduser()
    is_here = file.suffix in (*_JSON_SUFFIXES, *_READERS) or path.startswith(("/", "./", "../", "~"))
    return file if is_here or file.exists() else None


def read_rows(source: DataSet, key: str) -> Iterator[Row]:
    """Yield the rows of a data set that pass its filter, up to its limit.

    Args:
        source: not one that a domain makes.
        key: configuration key or domain that named it, for messages.

    Raises:
        DomainError: it cannot be read, a filter names no field, or the package `datasets` is needed and missing.
    """
    rows = _all_rows(source, key)
    if source.answers is not None:
        answers = {row.get("id"): row for row in _all_rows(DataSet(path=source.answers), key)}
        rows = (row | answers.get(row.get("id"), {}) for row in rows)
    if source.filter:
        rows = (row for row in rows if _passes(row, source, key))
    return itertools.islice(rows, source.limit)


def _all_rows(source: DataSet, key: str) -> Iterable[Row]:
    local = _local(source.path)
    if local is not None and local.suffix in _JSON_SUFFIXES and not local.is_dir():
        return read_jsonl(local, key)
    loaded = _load(source, local, key)
    return (dict(row) for row in loaded)


def _load(source: DataSet, local: Path | None, key: str) -> Iterable[Any]:
    datasets = optional("datasets", key, "data")
    if local is not None and not local.exists():
        raise DomainError(f"{key}: cannot read {source.path!r}: it is not there. Correct the name of the data set.")
    split = source.split or "train"
    try:
        if local is not None and local.is_dir() and any((local / f"{of}.json").exists() for of in _SAVED):
            saved = datasets.load_from_disk(str(local))
            return saved if isinstance(saved, datasets.Dataset) else saved[split]
        if local is not None and local.is_dir():
            return datasets.load_dataset(str(local), source.subset, split=split)
        reader = "json" if source.path.endswith(_JSON_SUFFIXES) else _READERS.get(Path(source.path).suffix)
        if reader is not None:
            # Without its own idea of what means "no value": an answer may be "None" or "NA".
            words = {"keep_default_na": False} if reader == "csv" else {}
            files = str(local) if local is not None else source.path
            return datasets.load_dataset(reader, data_files=files, split="train", **words)
        return datasets.load_dataset(source.path, source.subset, split=split, revision=source.revision)
    except Exception as error:  # "not there", "no network" and "no such split" have no common base
        first_line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        where = f" {_WITHOUT_THE_HUB}" if local is None else ""
        said = f"subset {source.subset!r}, split {split!r}, revision {source.revision!r}"
        raise DomainError(f"{key}: cannot load the data set {source.path!r} ({said}): {first_line}.{where}") from error


_WITHOUT_THE_HUB = (
    "Without access to the hub: load it once on a machine with access and copy its cache (HF_HOME), or save it there "
    "with save_to_disk or as a JSONL file and name that."
)
#: Files in a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.
_SAVED = ("dataset_dict", "state")


def _passes(row: Row, source: DataSet, key: str) -> bool:
    for path, wanted in source.filter.items():
        value = lookup(row, path)
        if value is MISSING:
            raise DomainError(
                f"{key}: the filter of {source.name or source.path!r} names {path!r}, but a row has the fields "
                f"{', '.join(field_names(row))}. Name one of them."
            )
        rules = wanted if isinstance(wanted, Mapping) else {"equals": wanted}
        unknown = [rule for rule in rules if rule != "equals" and rule not in _COMPARISONS]
        if unknown:
            raise DomainError(
                f"{key}: the filter {path!r} of {source.name or source.path!r} has {unknown}, expected a value, a list "
                f"of values, or a mapping of {', '.join(_COMPARISONS)}. Correct it."
            )
        if not all(_holds(value, rule, bound) for rule, bound in rules.items()):
            return False
    return True


def _holds(value: Any, rule: str, bound: Any) -> bool:
    if rule in ("equals", "not"):
        is_one = any(value == each for each in (bound if isinstance(bound, list) else [bound]))
        return is_one == (rule == "equals")
    if rule == "contains":
        return bound in value if isinstance(value, list) else str(bound) in str(value)
    try:
        return float(value) >= float(bound) if rule == "min" else float(value) <= float(bound)
    except (TypeError, ValueError):
        return False


def read_jsonl(path: Path, key: str) -> list[Row]:
    """Return the rows of a file with one JSON object per line, or with one JSON list. Skips empty lines.

    The file is UTF-8, with or without a byte order mark; only a line feed ends a line. A row that is a list becomes
    an object with its places "0", "1", ... as keys, as the package `datasets` has it.

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
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # then its lines may be lists
            return [_as_row(row) for row in msgspec.json.decode(content, type=list[_JSONRow])]
    rows: list[Row] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_as_row(msgspec.json.decode(line, type=_JSONRow)))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DomainError(
                f"{key}: {path}:{number}: {error}; expected one JSON object per line, or one JSON list."
            ) from error
    return rows


_JSONRow = dict[str, Any] | list[dict[str, Any]]


def _as_row(value: Row | list[Row]) -> Row:
    return value if isinstance(value, dict) else {str(place): item for place, item in enumerate(value)}


Convert = Callable[[Row], "Problem | str"]


def load_data_sets(
    domain: str,
    names: Sequence[Any],
    draw: Draw,
    sizes: tuple[int, int],
    seed: int,
    convert: Convert,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> list[Problem]:
    """Return the problems of all data sets, in order.

    Args:
        names: texts and mappings (see `data_set`).
        draw, sizes, seed: of the problems that are made (see `draw_problems`).
        convert: makes a problem of the values of a row's fields, or says why the row is left out.
        fields, limit: of each data set that has none of its own and is not made.

    Raises:
        DomainError: a data set cannot be had or has rows of another shape, or none of its rows can be used.
    """
    sets = [_with_defaults(data_set(name, domain, KNOWN[domain], SPLITS), domain, fields, limit) for name in names]
    total = math.fsum(each.share or 1.0 for each in sets)
    has_shares = any(each.share is not None for each in sets)
    counts: Counter[str] = Counter()
    problems: list[Problem] = []
    for each in sets:
        counts[each.name] += 1
        if has_shares and counts[each.name] > 1:
            raise DomainError(f"{domain}: two data sets are called {each.name!r}. Give one of them another `name`.")
        if each.is_made:
            own = draw_problems(domain, [each.name], sizes, seed, draw)[: each.limit]
        else:
            own = _converted(domain, each, convert)
        if counts[each.name] > 1:
            own = [problem | {"id": f"{problem['id']}.{counts[each.name]}"} for problem in own]
        if has_shares:
            own = [problem | {"domain": each.name, "share": (each.share or 1.0) / total} for problem in own]
        problems += own
    return problems


def _with_defaults(
    source: DataSet, domain: str, fields: Mapping[str, str] | None = None, limit: int | None = None
) -> DataSet:
    """Return the data set with the map and the limit of the loader, where it has none of its own."""
    if source.is_made:
        return source
    own_fields = source.fields or dict(fields or {})
    known = dict.fromkeys(field.removesuffix("?") for shape in SHAPES[domain] for field in shape.fields)
    if unknown := [field for field in own_fields if field not in known]:
        raise DomainError(f"{domain}: `fields` maps {unknown}, expected some of {', '.join(known)}. Correct the map.")
    return msgspec.structs.replace(source, fields=own_fields, limit=source.limit or limit)


def _converted(domain: str, source: DataSet, convert: Convert) -> list[Problem]:
    problems: list[Problem] = []
    left_out: Counter[str] = Counter()
    for index, row in enumerate(read_rows(source, domain)):
        values = fitting(domain, row, index, source)
        several = has_several_questions(values.get("task"))
        problem = "with several turns of the user" if several else convert(values)
        if not isinstance(problem, str):
            try:
                msgspec.msgpack.encode(problem)
            except (TypeError, ValueError, OverflowError) as error:  # such as an integer of more than 64 bits
                problem = f"that cannot be sent to a rollout worker: {error}"
        if isinstance(problem, str):
            left_out[problem] += 1
        else:
            own = row.get("id")
            number = own if isinstance(own, str | int) and own != "" else index
            problems.append({"id": f"{source.name}-{number}", "dataset": source.name, **problem})
    reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common(5))
    if not problems:
        reasons = reasons or ("none passes its `filter`" if source.filter else "it has none")
        raise DomainError(f"{domain}: no row of {source.name!r} can be used: {reasons}. Correct it, or its mapping.")
    if left_out:
        logger.warning("%s: %d rows are left out: %s", source.name, left_out.total(), reasons)
    return problems


def fitting(domain: str, row: Row, index: int, source: DataSet) -> Row:
    """Return the values of the domain's fields in a row.

    Raises:
        DomainError: the row has no known shape, or not the fields of the user's map; says which map to write.
    """
    values = fit(row, domain, source.fields)
    if values is None:
        lacking = [path for path in source.fields.values() if lookup(row, path) is MISSING]
        fault = f"lacks {', '.join(lacking)} of `fields`" if lacking else "has no known shape"
        raise DomainError(
            f"{domain}: row {index} of {source.name!r} {fault}. It has the fields {', '.join(field_names(row))}. Say "
            f"which are those of {domain}, for instance +dataset_loader_params.fields='{map_of(domain)}' "
            "(dots lead into nested fields), or `fields` of this data set alone."
        )
    return values


#: What a domain needs besides, to load data sets: package and extra.
_PACKAGES = {"math": ("math_verify", "math")}
_SHOWN_ROWS, _SHOWN_CHARACTERS, _SHOWN_FILE_BYTES = 3, 200, 32 << 20


def preview(domain: str, names: Sequence[Any], fields: Mapping[str, str] | None = None) -> list[str]:
    """Say of data sets what can be said at once: without the network and without importing large packages.

    Raises:
        DomainError: a name is unknown, a file is missing or of another shape, or a package is missing.
    """
    lines = []
    for each in (data_set(name, domain, KNOWN[domain], SPLITS) for name in names):
        local = _local(each.path)
        if domain in _PACKAGES:
            _look_for(*_PACKAGES[domain], domain)
        if each.is_made:
            continue
        is_json = local is not None and local.suffix in _JSON_SUFFIXES and not local.is_dir()
        if not is_json:
            _look_for("datasets", "data", domain)
        if local is None:
            lines.append(f"{each.name}: not looked at, {each.path!r} may have to be downloaded")
        elif not local.exists():
            raise DomainError(
                f"{domain}: cannot read {each.path!r}: it is not there. Correct the name of the data set."
            )
        elif not is_json or local.stat().st_size > _SHOWN_FILE_BYTES:
            lines.append(f"{each.name}: {each.path} is there; its rows were not looked at")
        else:
            source = _with_defaults(each, domain, fields)
            for index, row in enumerate(itertools.islice(read_rows(source, domain), _SHOWN_ROWS)):
                values = fitting(domain, row, index, source)
                shown = "; ".join(f"{field}: {str(value)[:_SHOWN_CHARACTERS]!r}" for field, value in values.items())
                lines.append(f"{each.name}, row {index}: {shown}")
    return lines


def _look_for(package: str, extra: str, domain: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise DomainError(missing_package(package, domain, extra))
