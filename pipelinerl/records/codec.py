"""Encodes records as lines of JSON and decodes them, checking schema, checksum and finite numbers. No I/O.

The last field, `crc`, has 8 hexadecimal digits: the CRC-32 of the line before it (without the closing brace).

JSON has neither NaN nor infinity; encoders write `null`, which a reader would take for a missing value. Such a record
is rejected here, with the path to the number.
"""

from __future__ import annotations

import math
import types
import zlib
from collections.abc import Collection, Iterator
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.records.sample import SCHEMA_VERSION

T = TypeVar("T")

_SCHEMA_SUFFIX = b'"schema":%d' % SCHEMA_VERSION
_CRC_FIELD = b',"crc":"'
#: Bytes that the checksum adds: the field with 8 digits, in place of `}`.
_CRC_BYTES = len(_CRC_FIELD) + 8 + 2
_SHOWN_BYTES = 120


class _SchemaProbe(msgspec.Struct):
    schema: int | None = None


class RecordCodec(Generic[T]):
    """Encodes and decodes records of one type (a msgspec struct with a field `schema`, or a union of such)."""

    def __init__(self, record_type: Any) -> None:
        self._types = _struct_types(record_type)
        self._name = " | ".join(struct.__name__ for struct in self._types)
        self._decoder = msgspec.json.Decoder(record_type)
        self._encoder = msgspec.json.Encoder()

    def encode(self, record: T) -> bytes:
        """Return the record as one line without the newline.

        Raises:
            StreamError: wrong type, a value that JSON cannot hold, NaN or infinity, or a foreign `schema`.
        """
        if not isinstance(record, self._types):
            raise StreamError(f"cannot write a {type(record).__name__}: this stream holds {self._name}")
        schema = getattr(record, "schema", None)
        if schema != SCHEMA_VERSION:
            raise StreamError(f"cannot write a record with schema {schema!r}: this version writes {SCHEMA_VERSION}")
        try:
            data = self._encoder.encode(record)
        except (TypeError, ValueError, OverflowError) as error:
            raise StreamError(f"cannot write a {type(record).__name__}: {error}") from error
        # Non-finite numbers become `null`; without one there is nothing to search for.
        if b"null" in data:
            for path, value in _non_finite(record, ""):
                raise StreamError(
                    f"cannot write a {type(record).__name__}: {path} is {value}; numbers on a stream must be finite. "
                    "Reject the sample, or leave the metric out, where the number is made"
                )
        return with_checksum(data)

    def decode(self, data: bytes) -> T:
        """Return the record of one line.

        Raises:
            StreamError: not JSON, damaged, not of this type, or of another `schema`; the message says why.
        """
        try:
            # Fast path: our encoder writes `schema` last.
            if not data.endswith(_SCHEMA_SUFFIX, 0, -_CRC_BYTES):
                _refuse_schema(msgspec.json.decode(data, type=_SchemaProbe).schema)
            check_line(data)
            record: T = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if "missing required field `input_ids`" in str(error):
                raise StreamError(f"the tokens of this {self._name} were removed (streams.retention=heads)") from error
            raise StreamError(f"not a {self._name}: {error}; {_shown(data)}") from error
        return record


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
    """Verify the checksum at the end of a record in JSON.

    Raises:
        StreamError: it is wrong or missing.
    """
    body = memoryview(line)[:-_CRC_BYTES]
    found = line[-_CRC_BYTES:]
    if not found.startswith(_CRC_FIELD):
        raise StreamError(f"damaged: no checksum at its end; {_shown(line)}")
    if found[len(_CRC_FIELD) :] != b'%08x"}' % zlib.crc32(body):
        raise StreamError(f"damaged: its checksum does not match; {_shown(line)}")


def _struct_types(record_type: Any) -> tuple[type[msgspec.Struct], ...]:
    members = get_args(record_type) if get_origin(record_type) in (Union, types.UnionType) else (record_type,)
    for member in members:
        if not (isinstance(member, type) and issubclass(member, msgspec.Struct)):
            raise StreamError(f"{member!r} cannot go on a stream: a record is a msgspec.Struct")
        if "schema" not in member.__struct_fields__:
            raise StreamError(f"{member.__name__} cannot go on a stream: it has no field `schema`")
    return tuple(members)


def _non_finite(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield (path, number) of every NaN or infinity inside `value`."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield path, value
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from _non_finite(getattr(value, field), f"{path}.{field}" if path else field)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _non_finite(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | set | frozenset) and not _all_finite(value):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{path}[{index}]")


def _all_finite(values: Collection[Any]) -> bool:
    """Whether these are numbers and all finite: a fast check that saves the walk."""
    try:
        return all(map(math.isfinite, values))
    except (TypeError, OverflowError):
        return False


def _shown(data: bytes) -> str:
    cut = "..." if len(data) > _SHOWN_BYTES else ""
    return f"{len(data)} bytes, starting with {data[:_SHOWN_BYTES]!r}{cut}"
