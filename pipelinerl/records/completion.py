"""A completion on its way from server to client: ids and log-probs as bytes, not as text. No torch, no I/O.

A server writes it for a client that asks for `MEDIA_TYPE`. It takes 8 bytes a token; vLLM's JSON takes 138, and making
and reading that takes longer than all the rest of a request. It is a msgpack map, whose first byte is above 0x7f: no
JSON text begins with that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

#: Where a server completes token ids, in vLLM's own form or in this one.
GENERATE_PATH = "/inference/v1/generate"
#: What a client sends as `Accept` and a server as `Content-Type`.
MEDIA_TYPE = "application/vnd.pipelinerl.completion"
#: Rises when a reader of the old layout would misread the new one.
LAYOUT = 3

_ITEM_BYTES = 4


class PackedSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start, end)` were sampled by the weights with the label `version`."""

    version: str
    start: int
    end: int


class PackedCompletion(msgspec.Struct, frozen=True):
    """A completion. `token_ids` are int32, `logprobs` float32, one number a token; None: not asked for."""

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
    return array("i", token_ids).tobytes()


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
    return array("i", _whole(data)).tolist()


def unpack_logprobs(data: bytes) -> list[float]:
    """Return float32 numbers as floats of the very same value; NaN and infinities stay what they are.

    Raises:
        ValueError: no whole number of numbers.
    """
    return array("f", _whole(data)).tolist()


def _whole(data: bytes) -> bytes:
    if len(data) % _ITEM_BYTES:
        raise ValueError(f"packed completion: an array of {len(data)} bytes, expected a multiple of {_ITEM_BYTES}")
    return data
