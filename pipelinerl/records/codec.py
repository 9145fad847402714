"""Records to bytes and back, checked for their schema, their checksum and finite numbers. No I/O.

There are two formats, told apart by the first byte: one line of JSON (files, readable by eye), and msgpack with arrays
of numbers as bytes (see `records.packed`). Both end with the CRC-32 of what precedes it: JSON as a last field `crc` of
8 hexadecimal digits (over the line without the closing brace), msgpack as 4 bytes in little-endian order.

JSON has no NaN and no infinity: an encoder writes them as `null`, which a reader would take for "no value". A record
that holds one is refused here, in both formats, with the path to the number.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import types
import zlib
from collections.abc import Collection, Iterator
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.records.sample import SCHEMA_VERSION

T = TypeVar("T")

_SCHEMA_SUFFIX = b'"schema":%d' % SCHEMA_VERSION
_PACKED_SUFFIX = b"\xa6schema" + msgspec.msgpack.encode(SCHEMA_VERSION)
_CRC_FIELD = b',"crc":"'
#: Bytes that the checksum adds: the field with 8 digits in place of `}`, and 4 bytes.
_JSON_CRC_BYTES, _PACKED_CRC_BYTES = len(_CRC_FIELD) + 8 + 2, 4
# The first bytes of a msgpack map.
_MAP_STARTS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
# What a float64 that is no finite number looks like in msgpack.
_MAYBE_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_SHOWN_BYTES = 120


class _SchemaProbe(msgspec.Struct):
    schema: int | None = None


class RecordCodec(Generic[T]):
    """Encodes and decodes records of one type (a msgspec struct with a field `schema`, or a union of such).

    Args:
        record_type: of all records.
        packed: what `encode` writes: msgpack with arrays as bytes, or one line of JSON. `decode` reads both.
    """

    def __init__(self, record_type: Any, packed: bool = False) -> None:
        self._types = _struct_types(record_type)
        self._record_type = record_type
        self._name = " | ".join(struct.__name__ for struct in self._types)
        self._decoder = msgspec.json.Decoder(record_type)
        self._encoder = msgspec.json.Encoder()
        self._probe = msgspec.json.Decoder(_SchemaProbe)
        self._packed = packed
        self._packer: _Packer | None = None

    def encode(self, record: T) -> bytes:
        """Return the record as one line of JSON without the newline, or packed.

        Raises:
            StreamError: wrong type, a value that JSON cannot hold, NaN or infinity, or a foreign `schema`.
        """
        if not isinstance(record, self._types):
            raise StreamError(f"cannot write a {type(record).__name__}: this stream holds {self._name}")
        schema = getattr(record, "schema", None)
        if schema != SCHEMA_VERSION:
            raise StreamError(f"cannot write a record with schema {schema!r}: this version writes {SCHEMA_VERSION}")
        try:
            data = self._packing.encode(record) if self._packed else self._encoder.encode(record)
        except (TypeError, ValueError, OverflowError, StreamError) as error:
            _refuse_non_finite(record)
            raise StreamError(f"cannot write a {type(record).__name__}: {error}") from error
        if self._packed:
            if _MAYBE_NON_FINITE.search(data) is not None:
                _refuse_non_finite(record)
            return data + zlib.crc32(data).to_bytes(_PACKED_CRC_BYTES, "little")
        # In JSON every non-finite number becomes `null`: without that word there is nothing to look for, and arrays
        # need no look if it does not follow a comma or a bracket.
        if b"null" in data:
            _refuse_non_finite(record, in_arrays=b",null" in data or b"[null" in data)
        return with_checksum(data)

    def decode(self, data: bytes) -> T:
        """Return the record of one line, or of one packed message.

        Raises:
            StreamError: neither of them, damaged, not of this type, or of another `schema`; the message says why.
        """
        if data and data[0] in _MAP_STARTS:
            return self._decode_packed(data)
        # The encoder writes `schema` last, so its own lines need no second look.
        if not data.endswith(_SCHEMA_SUFFIX, 0, -_JSON_CRC_BYTES):
            self._check_schema(data)
        check_line(data)
        try:
            record: T = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            if "missing required field `input_ids`" in str(error):
                raise StreamError(f"the tokens of this {self._name} were removed (streams.retention=heads)") from error
            raise StreamError(f"not a {self._name}: {error}; {_shown(data)}") from error
        except UnicodeDecodeError as error:
            raise StreamError(f"not UTF-8: {error}; {_shown(data)}") from error
        return record

    def _decode_packed(self, data: bytes) -> T:
        body = data[:-_PACKED_CRC_BYTES]
        if zlib.crc32(body) != int.from_bytes(data[-_PACKED_CRC_BYTES:], "little"):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # schema 1 had no checksum
                _refuse_schema(msgspec.msgpack.decode(data, type=_SchemaProbe).schema)
            raise StreamError(f"damaged: its checksum does not fit; {_shown(data)}")
        try:
            if not body.endswith(_PACKED_SUFFIX):
                _refuse_schema(msgspec.msgpack.decode(body, type=_SchemaProbe).schema)
            record: T = self._packing.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamError(f"not a {self._name}: {error}; {_shown(data)}") from error
        _refuse_schema(getattr(record, "schema", None))
        return record

    @property
    def _packing(self) -> _Packer:
        if self._packer is None:
            self._packer = _Packer(self._record_type)
        return self._packer

    def _check_schema(self, data: bytes) -> None:
        try:
            schema = self._probe.decode(data).schema
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamError(f"not a JSON record: {error}; {_shown(data)}") from error
        _refuse_schema(schema)


class _Packer:
    """The packed format of one record type. Made when it is first needed: it loads NumPy."""

    def __init__(self, record_type: Any) -> None:
        from pipelinerl.records.packed import twins_of

        wire_type, self._twins = twins_of(record_type)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(wire_type)

    def encode(self, record: Any) -> bytes:
        return self._encoder.encode(self._twins[type(record)].pack(record))

    def decode(self, data: bytes) -> Any:
        wire = self._decoder.decode(data)
        return self._twins[type(wire)].unpack(wire)


def _refuse_schema(schema: int | None) -> None:
    if schema == SCHEMA_VERSION:
        return
    found = "no schema" if schema is None else f"schema {schema}"
    raise StreamError(
        f"the record has {found}, this version reads schema {SCHEMA_VERSION}. Read the run with the version of "
        "pipelinerl that wrote it, or start a new run in another output_dir"
    )


def with_checksum(line: bytes) -> bytes:
    """Add the checksum to a record in JSON that ends with `}`."""
    body = line[:-1]
    return b'%b%b%08x"}' % (body, _CRC_FIELD, zlib.crc32(body))


def check_line(line: bytes) -> None:
    """Compare the checksum at the end of a record in JSON.

    Raises:
        StreamError: it does not fit, or there is none.
    """
    body = memoryview(line)[:-_JSON_CRC_BYTES]
    found = line[-_JSON_CRC_BYTES:]
    if not found.startswith(_CRC_FIELD):
        raise StreamError(f"damaged: no checksum at its end; {_shown(line)}")
    if found[len(_CRC_FIELD) :] != b'%08x"}' % zlib.crc32(body):
        raise StreamError(f"damaged: its checksum does not fit; {_shown(line)}")


def encode(record: Any) -> bytes:
    """Encode one record; see `RecordCodec.encode`. In a loop, keep a `RecordCodec`."""
    return RecordCodec[Any](type(record)).encode(record)


def decode(data: bytes, record_type: Any) -> Any:
    """Decode one record of `record_type`; see `RecordCodec.decode`. In a loop, keep a `RecordCodec`."""
    return RecordCodec[Any](record_type).decode(data)


def _struct_types(record_type: Any) -> tuple[type[msgspec.Struct], ...]:
    members = get_args(record_type) if get_origin(record_type) in (Union, types.UnionType) else (record_type,)
    for member in members:
        if not (isinstance(member, type) and issubclass(member, msgspec.Struct)):
            raise StreamError(f"{member!r} cannot go on a stream: a record is a msgspec.Struct")
        if "schema" not in member.__struct_fields__:
            raise StreamError(f"{member.__name__} cannot go on a stream: it has no field `schema`")
    return tuple(members)


def _refuse_non_finite(record: Any, in_arrays: bool = True) -> None:
    for path, value in _non_finite(record, "", in_arrays):
        raise StreamError(
            f"cannot write a {type(record).__name__}: {path} is {value}; numbers on a stream must be finite. "
            "Reject the sample, or leave the metric out, where the number is made"
        )


def _non_finite(value: Any, path: str, in_arrays: bool) -> Iterator[tuple[str, float]]:
    """Yield (path, number) of every NaN or infinity inside `value`; `in_arrays`: also in its lists of numbers."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield path, value
    elif isinstance(value, msgspec.Struct):
        skipped = () if in_arrays else _number_lists(type(value))
        for field in value.__struct_fields__:
            if field not in skipped:
                yield from _non_finite(getattr(value, field), f"{path}.{field}" if path else field, in_arrays)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _non_finite(item, f"{path}[{key!r}]", in_arrays)
    elif isinstance(value, list | tuple | set | frozenset):
        if _all_finite(value):
            return
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{path}[{index}]", in_arrays)


@functools.cache
def _number_lists(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields that are lists of numbers."""
    return frozenset(field.name for field in msgspec.structs.fields(struct) if field.type in (list[int], list[float]))


def _all_finite(values: Collection[Any]) -> bool:
    """Whether these are numbers and all of them finite; a quick look that spares the walk."""
    try:
        return all(map(math.isfinite, values))
    except (TypeError, OverflowError):
        return False


def _shown(data: bytes) -> str:
    cut = "..." if len(data) > _SHOWN_BYTES else ""
    return f"{len(data)} bytes, starting with {data[:_SHOWN_BYTES]!r}{cut}"
