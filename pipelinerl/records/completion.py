"""A completion on its way from server to client: ids and log-probs as bytes, not as text. No torch, no I/O.

A server writes it for a client that asks for `MEDIA_TYPE`. It takes 8 bytes a token; vLLM's JSON takes 138, and making
and reading that takes longer than all the rest of a request. It is a msgpack map, whose first byte is above 0x7f: no
JSON text begins with that.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from pipelinerl.records.sample import Array

#: Where a server completes token ids, in vLLM's own form or in this one.
GENERATE_PATH = "/inference/v1/generate"
#: What a client sends as `Accept` and a server as `Content-Type`.
MEDIA_TYPE = "application/vnd.pipelinerl.completion"
#: Rises when a reader of the old layout would misread the new one.
LAYOUT = 2

_ITEM_BYTES = 4
Number = TypeVar("Number", int, float)


class PackedSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start, end)` of a segment were sampled by the weights with the label `version`."""

    version: str
    start: int
    end: int


class PackedSegment(msgspec.Struct, frozen=True):
    """Tokens that were sampled without an interruption. A segment that was cut off (`finish_reason` abort) may be
    continued by another one.

    `token_ids` are int32 and `logprobs` float32, both little-endian, one number a token; None: not asked for. Nothing
    writes `routed_experts` (shape [tokens, layers, experts per token]) yet.
    """

    token_ids: bytes
    logprobs: bytes | None
    finish_reason: str | None
    weight_versions: list[PackedSpan] | None
    routed_experts: Array | None = None


class PackedCompletion(msgspec.Struct, frozen=True):
    """A completion of one segment or several in order. The properties are those of the whole."""

    layout: int
    segments: list[PackedSegment]
    stop_reason: int | str | None

    @property
    def token_ids(self) -> bytes:
        return b"".join(segment.token_ids for segment in self.segments)

    @property
    def logprobs(self) -> bytes | None:
        """None if a segment has none."""
        parts = [segment.logprobs for segment in self.segments if segment.logprobs is not None]
        return b"".join(parts) if len(parts) == len(self.segments) else None

    @property
    def finish_reason(self) -> str | None:
        return self.segments[-1].finish_reason if self.segments else None

    @property
    def weight_versions(self) -> list[PackedSpan] | None:
        """Spans over the tokens of all segments; None if a segment has none."""
        spans: list[PackedSpan] = []
        start = 0
        for segment in self.segments:
            if segment.weight_versions is None:
                return None
            for span in segment.weight_versions:
                spans.append(PackedSpan(span.version, start + span.start, start + span.end))
            start += len(segment.token_ids) // _ITEM_BYTES
        return spans


class _Layout(msgspec.Struct):
    layout: int


def weight_label(version: int, policy: str = "") -> str:
    """What a server calls the weights of `version`; of another policy than the run's only one: `policy:version`."""
    return f"{policy}:{version}" if policy else str(version)


def parse_weight_label(label: str) -> tuple[str, int]:
    """Return (policy, version) of a label.

    Raises:
        ValueError: it is none.
    """
    policy, _, number = label.rpartition(":")
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"weight version {label!r} is not a policy version")
    return policy, int(number)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PackedCompletion).decode
_decode_layout = msgspec.msgpack.Decoder(_Layout).decode


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
    """Return the body of an answer with one segment."""
    segment = PackedSegment(token_ids, logprobs, finish_reason, weight_versions)
    return _encode(PackedCompletion(LAYOUT, [segment], stop_reason))


def decode_completion(content: bytes) -> PackedCompletion:
    """Read the body of an answer.

    Raises:
        ValueError: it is cut off, has other fields, no segment, or a layout that this version does not know.
    """
    try:
        layout = _decode_layout(content).layout
        if layout != LAYOUT:
            raise ValueError(
                f"packed completion: got layout {layout}, expected {LAYOUT}. "
                "Run the same version of pipelinerl on servers and actors."
            )
        packed = _decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"packed completion: {error}") from error
    if not packed.segments:
        raise ValueError("packed completion: no segment")
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
