"""The wire format of completions: packed by the server, checked by the client. No torch, no I/O.

Clients that accept `MEDIA_TYPE` get ids and log-probs as bytes: 8 bytes per token. vLLM's JSON takes 138, and encoding
and decoding it takes longer than the rest of the request. A packed completion is a msgpack map, whose first byte is
above 0x7f: no JSON text begins with that.

A completion in either form that passes the check can be trained on; any other is rejected with a reason.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Literal, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import RolloutError
from pipelinerl.records.sample import Array, VersionSpan

#: Where a server completes token ids, in vLLM's own form or in this one.
GENERATE_PATH = "/inference/v1/generate"
#: What a client sends as `Accept` and a server as `Content-Type`.
MEDIA_TYPE = "application/vnd.pipelinerl.completion"
#: Rises when a reader of the old layout would misread the new one.
LAYOUT = 2

# In JSON the server writes NaN and -inf as -9999.0.
LOWEST_LOGPROB = -9998.0
# Rounding can push the log-prob of a certain token slightly above 0.
_HIGHEST_LOGPROB = 1e-3
_FINISHED = {"stop": True, "length": False, "repetition": False}
# vLLM's label for weights that were never updated.
_UNLABELLED = "default"

_ITEM_BYTES = 4
Number = TypeVar("Number", int, float)


class PackedSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start, end)` of a segment were sampled by the weights with the label `version`."""

    version: str
    start: int
    end: int


class PackedSegment(msgspec.Struct, frozen=True):
    """Tokens sampled without interruption. Another segment may continue one that was cut off (`finish_reason` abort).

    `token_ids` (int32) and `logprobs` (float32, None: not requested) are little-endian, one number per token.
    `routed_experts` (shape [tokens, layers, experts per token]) is reserved.
    """

    token_ids: bytes
    logprobs: bytes | None
    finish_reason: str | None
    weight_versions: list[PackedSpan] | None
    routed_experts: Array | None = None


class PackedCompletion(msgspec.Struct, frozen=True):
    """A completion of one or more segments, in order. The properties describe the whole."""

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
    """A server's label for the weights of `version`: the number, or `policy:version` for a named policy."""
    return f"{policy}:{version}" if policy else str(version)


def parse_weight_label(label: str) -> tuple[str, int]:
    """Return (policy, version) of a label.

    Raises:
        ValueError: not a label.
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
        ValueError: it is truncated, has other fields, no segment, or an unknown layout.
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
        ValueError: not a multiple of four bytes.
    """
    return _little_endian(array("i", _whole(data))).tolist()


def unpack_logprobs(data: bytes) -> list[float]:
    """Return float32 numbers as floats, exactly; NaN and infinities are kept.

    Raises:
        ValueError: not a multiple of four bytes.
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


class WireLogprob(msgspec.Struct, gc=False):  # one per token: keep them off the garbage collector
    token_id: int
    logprob: float | None = None


class WireLogprobs(msgspec.Struct):
    content: list[WireLogprob] | None = None


class WireChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[PackedSpan] | None = None


class WireResponse(msgspec.Struct):
    choices: list[WireChoice]


class Completion(msgspec.Struct, frozen=True):
    """One checked completion. `logprobs` (if collected) and `version_spans` cover `token_ids` exactly."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_string: str | None
    version_spans: list[VersionSpan]


class _Answer(NamedTuple):
    """An unchecked choice in either form. `logprob_ids` are the tokens that the log-probs claim to belong to."""

    token_ids: list[int]
    logprobs: list[float] | list[float | None] | None
    logprob_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[PackedSpan] | None


_decode_json = msgspec.json.Decoder(WireResponse).decode


def is_finished(finish_reason: str) -> bool:
    """Return whether the model ended the sequence itself (end token or stop string) rather than running out of room."""
    return _FINISHED.get(finish_reason, False)


def read_completion(
    content: bytes, collect_logprobs: bool = True, unlabelled_version: int | None = None
) -> Completion | Literal["aborted", "empty"]:
    """Return the completion in `content`, or why the request has to be sent again.

    Args:
        unlabelled_version: version of tokens from a server that was never given one; None rejects them.

    Raises:
        RolloutError: `bad_response`, `bad_finish_reason`, `length_mismatch`, `missing_logprobs`, `bad_logprob`,
            `unversioned` or `bad_version_spans`. Nothing is truncated or filled in.
    """
    try:
        answer = _read_packed(content) if is_packed(content) else _read_json(content)
    except ValueError as error:
        raise RolloutError("bad_response", str(error)) from error
    if answer.finish_reason in (None, "abort", "error"):
        return "aborted"
    if answer.finish_reason not in _FINISHED:
        raise RolloutError("bad_finish_reason", str(answer.finish_reason))
    if not answer.token_ids:
        return "empty"
    logprobs = _checked_logprobs(answer) if collect_logprobs else []
    spans = _labelled_spans(answer.weight_versions or [], unlabelled_version)
    check_spans(spans, len(answer.token_ids))
    stop_string = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    return Completion(answer.token_ids, logprobs, answer.finish_reason, stop_string, spans)


def check_spans(spans: list[VersionSpan], length: int) -> None:
    """Check that `spans` cover `length` tokens without gaps.

    Raises:
        RolloutError: `unversioned` without any span, else `bad_version_spans`.
    """
    if not spans:
        raise RolloutError("unversioned", f"no version spans for {length} tokens")
    expected_start = 0
    for span in spans:
        if span.start != expected_start or span.end <= span.start:
            raise RolloutError("bad_version_spans", f"span [{span.start}, {span.end}) after {expected_start} tokens")
        expected_start = span.end
    if expected_start != length:
        raise RolloutError("bad_version_spans", f"spans cover {expected_start} of {length} tokens")


def _read_packed(content: bytes) -> _Answer:
    packed = decode_completion(content)
    ids = unpack_ids(packed.token_ids)
    logprobs = None if packed.logprobs is None else unpack_logprobs(packed.logprobs)
    # The server packs the log-probs of exactly these ids.
    return _Answer(ids, logprobs, ids, packed.finish_reason, packed.stop_reason, packed.weight_versions)


def _read_json(content: bytes) -> _Answer:
    choices = _decode_json(content).choices  # its errors are ValueErrors, also for invalid UTF-8
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices, expected 1")
    choice = choices[0]
    entries = choice.logprobs.content if choice.logprobs is not None else None
    return _Answer(
        choice.token_ids or [],
        None if entries is None else [entry.logprob for entry in entries],
        [entry.token_id for entry in entries or []],
        choice.finish_reason,
        choice.stop_reason,
        choice.weight_versions,
    )


def are_logprobs(values: Sequence[float]) -> bool:
    """False if a value is not finite, positive beyond rounding, or the server's placeholder for NaN."""
    # Runs in C: a NaN or an infinity makes the sum one too.
    if not len(values):
        return True
    return isfinite(sum(values)) and min(values) > LOWEST_LOGPROB and max(values) <= _HIGHEST_LOGPROB


def _checked_logprobs(answer: _Answer) -> list[float]:
    ids = answer.token_ids
    if answer.logprobs is None:
        raise RolloutError("missing_logprobs", f"no log-probs for {len(ids)} tokens")
    if len(answer.logprobs) != len(ids):
        raise RolloutError("length_mismatch", f"{len(answer.logprobs)} log-probs for {len(ids)} tokens")
    checked = []
    for token_id, logprob_id, value in zip(ids, answer.logprob_ids, answer.logprobs, strict=True):
        if logprob_id != token_id:
            raise RolloutError("length_mismatch", f"log-prob of token {logprob_id}, but token {token_id} was sampled")
        # The comparisons are false for NaN.
        if value is None or not LOWEST_LOGPROB < value <= _HIGHEST_LOGPROB:
            raise RolloutError("bad_logprob", f"log-prob {value} of token {token_id}")
        checked.append(value)
    return checked


def _labelled_spans(spans: list[PackedSpan], unlabelled_version: int | None) -> list[VersionSpan]:
    labelled = []
    for span in spans:
        label = span.version
        if label == _UNLABELLED and unlabelled_version is not None:
            label = str(unlabelled_version)
        try:
            policy, version = parse_weight_label(label)
        except ValueError as error:
            raise RolloutError("unversioned", str(error)) from error
        if policy:
            raise RolloutError("unversioned", f"tokens of policy {policy!r}, expected the run's only policy")
        labelled.append(VersionSpan(version, span.start, span.end))
    return labelled
