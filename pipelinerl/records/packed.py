"""Arrays of numbers as bytes: how a record travels in msgpack, where a list of 4,096 token ids is one byte string.

Called by the codec for the packed format. Pure: no I/O, waits for nothing. For every struct that holds a `list[int]`
or a `list[float]`, at any depth, a twin is made in which those fields are `bytes`; all other structs go as they are.

One array is a letter and the numbers in little-endian order: `i` int32, `q` int64, `f` float32 (only if that loses
nothing), `d` float64. An empty array is empty. Labels that repeat `input_ids` where they are not -100 are `m` and the
[start, end) runs of the trained tokens, as int32.
"""

from __future__ import annotations

import sys
import types
from array import array
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np

from pipelinerl.errors import StreamError
from pipelinerl.records.sample import IGNORED_LABEL

# `array` makes lists quicker than NumPy does. Its sizes are those of C, on every Linux.
_LETTERS = {ord(letter): letter for letter in "iqfd"}
_SWAP = sys.byteorder == "big"
_RUNS = ord("m")
_IDS, _LABELS = "input_ids", "labels"

Convert = Callable[[Any], Any]


class Twin:
    """What stands for one struct on the wire: `packed` is its type there, `pack` and `unpack` convert.

    `packed` is the struct itself if there is nothing to convert.
    """

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.struct = struct
        self._packs: dict[str, Convert] = {}
        self._unpacks: dict[str, Convert] = {}
        fields = []
        for field in msgspec.structs.fields(struct):
            packed, pack, unpack = _converted(field.type)
            if pack is not None and unpack is not None:
                self._packs[field.name], self._unpacks[field.name] = pack, unpack
            fields.append((field.name, packed, *_default(field, pack)))
        self._names = struct.__struct_fields__
        self._has_labels = _LABELS in self._packs and _IDS in self._packs
        self.packed = self._make(fields) if self._packs else struct

    def pack(self, record: Any) -> Any:
        """Raises StreamError for a number that is not finite, or a value that is no number."""
        if not self._packs:
            return record
        values = {name: getattr(record, name) for name in self._names}
        runs = _label_runs(values[_LABELS], values[_IDS]) if self._has_labels else None
        for name, pack in self._packs.items():
            if runs is not None and name == _LABELS:
                values[name] = runs
                continue
            try:
                values[name] = pack(values[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise StreamError(f"{self.struct.__name__}.{name}: {error}") from error
        return self.packed(**values)

    def unpack(self, wire: Any) -> Any:
        """Raises StreamError for bytes that are no array."""
        if not self._packs:
            return wire
        values = {name: getattr(wire, name) for name in self._names}
        try:
            for name, unpack in self._unpacks.items():
                if not (self._has_labels and name == _LABELS):
                    values[name] = unpack(values[name])
            if self._has_labels:
                values[_LABELS] = _read_labels(values[_LABELS], values[_IDS])
        except (KeyError, TypeError, ValueError) as error:
            raise StreamError(f"{self.struct.__name__} holds bytes that are no array of numbers: {error}") from error
        return self.struct(**values)

    def _make(self, fields: list[Any]) -> Any:
        config = self.struct.__struct_config__
        return msgspec.defstruct(
            f"Packed{self.struct.__name__}",
            fields,
            kw_only=True,
            tag=config.tag,
            tag_field=config.tag_field,
            array_like=config.array_like,
        )


def pack_ints(values: list[int]) -> bytes:
    """`values` as bytes. Raises OverflowError beyond 64 bits, TypeError for what is no integer."""
    if not values:
        return b""
    try:
        return b"i" + np.frombuffer(array("i", values), np.intc).astype("<i4", copy=False).tobytes()
    except OverflowError:
        return b"q" + np.array(array("q", values), "<i8").tobytes()


def pack_floats(values: list[float]) -> bytes:
    """`values` as bytes, in 32 bits each if that loses nothing. Raises ValueError if one is not finite."""
    if not values:
        return b""
    wide = np.frombuffer(array("d", values), np.float64)
    if not np.isfinite(wide).all():
        raise ValueError("not all numbers are finite")
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype("<f4")
    if np.array_equal(narrow, wide):
        return b"f" + narrow.tobytes()
    return b"d" + wide.astype("<f8", copy=False).tobytes()


def unpack_numbers(data: bytes) -> list[Any]:
    """The list of one array. Raises KeyError or ValueError if it is none."""
    if not data:
        return []
    numbers: array[Any] = array(_LETTERS[data[0]])
    numbers.frombytes(memoryview(data)[1:])
    if _SWAP:
        numbers.byteswap()
    return numbers.tolist()


def _label_runs(labels: list[int], input_ids: list[int]) -> bytes | None:
    """The short form of `labels`, or None if they say more than which tokens are trained."""
    if not labels or len(labels) != len(input_ids):
        return None
    try:
        wanted = np.frombuffer(array("q", labels), np.int64)
        ids = np.frombuffer(array("q", input_ids), np.int64)
    except (OverflowError, TypeError):
        return None
    trained = wanted != IGNORED_LABEL
    if not np.array_equal(wanted[trained], ids[trained]):
        return None
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False))
    return b"m" + edges.astype("<i4").tobytes()


def _read_labels(data: bytes, input_ids: list[int]) -> list[int]:
    if not data or data[0] != _RUNS:
        return unpack_numbers(data)
    labels = [IGNORED_LABEL] * len(input_ids)
    edges = np.frombuffer(data, "<i4", offset=1).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if not 0 <= start < end <= len(input_ids):
            raise ValueError(f"trained tokens [{start}, {end}) of {len(input_ids)}")
        labels[start:end] = input_ids[start:end]
    return labels


def _converted(kind: Any) -> tuple[Any, Convert | None, Convert | None]:
    """(type on the wire, conversion to it, conversion back) of a field of type `kind`; None: it goes as it is."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        twin = Twin(kind)
        return (kind, None, None) if twin.packed is kind else (twin.packed, twin.pack, twin.unpack)
    if get_origin(kind) is not list:
        return kind, None, None
    (item,) = get_args(kind)
    if item is int:
        return bytes, pack_ints, unpack_numbers
    if item is float:
        return bytes, pack_floats, unpack_numbers
    packed, pack, unpack = _converted(item)
    if pack is None or unpack is None or packed is bytes:
        return kind, None, None
    return list[packed], _each(pack), _each(unpack)  # type: ignore[valid-type]


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]


def _default(field: msgspec.structs.FieldInfo, pack: Convert | None) -> tuple[Any, ...]:
    if field.default is not msgspec.NODEFAULT:
        return (field.default,)
    if field.default_factory is msgspec.NODEFAULT:
        return ()
    if pack is None:
        return (msgspec.field(default_factory=field.default_factory),)
    return (pack(field.default_factory()),)


def twins_of(record_type: Any) -> tuple[Any, dict[type, Twin]]:
    """(type on the wire, twin by struct) of a struct or a union of structs; both directions are keys."""
    members = get_args(record_type) if get_origin(record_type) in (Union, types.UnionType) else (record_type,)
    twins = [Twin(member) for member in members]
    by_type: dict[type, Twin] = {}
    for twin in twins:
        by_type[twin.struct] = by_type[twin.packed] = twin
    kind: Any = Union[tuple(twin.packed for twin in twins)]  # noqa: UP007 - the members are only known here
    return kind, by_type
