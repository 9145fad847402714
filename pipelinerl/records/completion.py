"""A completion on its way from server to client: ids and log-probs as bytes, not as text. No torch, no I/O.

Written by a server (`inference.fast_output`) for a client that asks for `MEDIA_TYPE`, read by
`llm.answers`. Two arrays of four bytes a number take 8 bytes a token; as JSON with one object a token it is 138, and
making and reading those objects takes more time than all the rest of a request. It is msgpack, a map: its first byte is
above 0x7f, which no JSON text begins with, so that the two can be told apart without a header.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

#: Where a server completes token ids, in vLLM's own form or in this one.
GENERATE_PATH = "/inference/v1/generate"
#: What a client sends as `Accept` and a server as `Content-Type`.
MEDIA_TYPE = "application/vnd.pipelinerl.completion"
#: Rises when a reader of the old layout would misread the new one.
LAYOUT = 1

_ITEM_BYTES = 4
Number = TypeVar("Number", int, float)


class PackedSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start, end)` were sampled by the weights that the server calls `version`."""

    version: str
    start: int
    end: int


class PackedCompletion(msgspec.Struct, frozen=True):
    """`token_ids` are int32 and `logprobs` float32, both little-endian, one number a token; None: not asked for."""

    layout: int
    token_ids: bytes
    logprobs: bytes | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[PackedSpan] | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PackedCompletion).decode


def is_packed(content: bytes) -> bool:
    """Return whether an answer has this format rather than JSON."""
    return bool(content) and content[0] > 0x7F


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Return token ids as bytes.

    Raises:
        OverflowError: an id does not fit into 32 bits.
    """
    return _little_endian(array("i", token_ids)).tobytes()


def encode_completion(
    token_ids: bytes,
    logprobs: bytes | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
    weight_versions: list[PackedSpan] | None,
) -> bytes:
    """Return the body of an answer."""
    return _encode(PackedCompletion(LAYOUT, token_ids, logprobs, finish_reason, stop_reason, weight_versions))


def decode_completion(content: bytes) -> PackedCompletion:
    """Read the body of an answer.

    Raises:
        ValueError: it is cut off, has other fields, or a layout that this version does not know.
    """
    try:
        packed = _decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"packed completion: {error}") from error
    if packed.layout != LAYOUT:
        raise ValueError(
            f"packed completion: got layout {packed.layout}, expected {LAYOUT}. "
            "Run the same version of pipelinerl on servers and actors."
        )
    return packed


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids of `pack_ids`.

    Raises:
        ValueError: no whole number of ids.
    """
    return _little_endian(array("i", _whole(data))).tolist()


def unpack_logprobs(data: bytes) -> list[float]:
    """Return float32 numbers as floats of the very same value; NaN and infinities stay what they are.

    Raises:
        ValueError: no whole number of numbers.
    """
    return _little_endian(array("f", _whole(data))).tolist()


def _whole(data: bytes) -> bytes:
    if len(data) % _ITEM_BYTES:
        raise ValueError(f"packed completion: an array of {len(data)} bytes, expected a multiple of {_ITEM_BYTES}")
    return data


def _little_endian(numbers: array[Number]) -> array[Number]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
