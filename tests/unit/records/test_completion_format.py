"""The bytes of a fast answer, against bytes made by hand."""

from __future__ import annotations

import json
import math
import struct

import msgspec
import pytest

from pipelinerl.records.completion import (
    PackedCompletion,
    PackedSegment,
    PackedSpan,
    decode_completion,
    encode_completion,
    is_packed,
    pack_ids,
    parse_weight_label,
    unpack_ids,
    unpack_logprobs,
    weight_label,
)

SPANS = [PackedSpan("3", 0, 2), PackedSpan("4", 2, 3)]
IDS = bytes.fromhex("05000000 00010000 40e20100")  # 5, 256, 123456, the lowest byte first
LOGPROBS = bytes.fromhex("000000bf 000080c0 00000000")  # -0.5, -4, 0


def test_numbers_are_little_endian_and_four_bytes_each() -> None:
    assert pack_ids([5, 256, 123456]) == IDS
    assert unpack_ids(IDS) == [5, 256, 123456]
    assert unpack_logprobs(LOGPROBS) == [-0.5, -4.0, 0.0]
    assert (unpack_ids(b""), unpack_logprobs(b""), pack_ids([])) == ([], [], b"")


def test_the_body_is_a_msgpack_map() -> None:
    content = encode_completion(IDS, LOGPROBS, "stop", "END", SPANS)
    assert msgspec.msgpack.decode(content) == {
        "layout": 2,
        "segments": [
            {
                "token_ids": IDS,
                "logprobs": LOGPROBS,
                "finish_reason": "stop",
                "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
                "routed_experts": None,
            }
        ],
        "stop_reason": "END",
    }
    assert decode_completion(content) == PackedCompletion(2, [PackedSegment(IDS, LOGPROBS, "stop", SPANS)], "END")


def test_a_body_written_by_hand() -> None:
    # A fixmap of 3 with a fixarray of one fixmap of 4; bin8 has its length.
    content = (
        b"\x83\xa6layout\x02\xa8segments\x91\x84\xa9token_ids\xc4\x04\x07\x00\x00\x00\xa8logprobs\xc0"
        b"\xadfinish_reason\xa6length\xafweight_versions\x90\xabstop_reason\xc0"
    )
    segment = PackedSegment(b"\x07\x00\x00\x00", None, "length", [])
    assert decode_completion(content) == PackedCompletion(2, [segment], None)


def test_segments_are_one_completion_each_with_its_versions() -> None:
    first = PackedSegment(IDS, LOGPROBS, "abort", SPANS)
    second = PackedSegment(IDS[:4], LOGPROBS[:4], "stop", [PackedSpan("4", 0, 1)])
    whole = PackedCompletion(2, [first, second], None)
    assert decode_completion(msgspec.msgpack.encode(whole)) == whole
    assert (whole.token_ids, whole.logprobs, whole.finish_reason) == (IDS + IDS[:4], LOGPROBS + LOGPROBS[:4], "stop")
    assert whole.weight_versions == [*SPANS, PackedSpan("4", 3, 4)]
    without = PackedCompletion(2, [first, PackedSegment(IDS, None, "stop", None)], None)
    assert without.logprobs is None and without.weight_versions is None


def test_weights_are_named_after_their_policy() -> None:
    assert (weight_label(7), weight_label(7, "critic")) == ("7", "critic:7")
    assert (parse_weight_label("7"), parse_weight_label("critic:7")) == (("", 7), ("critic", 7))
    for label in ("", "default", "critic:", "-1", "\u0663"):
        with pytest.raises(ValueError, match="weight version"):
            parse_weight_label(label)


def test_a_float32_comes_back_as_the_very_same_number() -> None:
    third = struct.unpack("<f", struct.pack("<f", -1 / 3))[0]
    assert unpack_logprobs(struct.pack("<f", -1 / 3)) == [third]
    strange = unpack_logprobs(struct.pack("<3f", math.nan, -math.inf, -0.0))
    assert math.isnan(strange[0]) and strange[1] == -math.inf and strange[2] == 0.0


@pytest.mark.parametrize("content", [b"", json.dumps({"choices": []}).encode(), b" {}", b"[]"])
def test_json_is_never_taken_for_it(content: bytes) -> None:
    assert not is_packed(content)
    assert is_packed(encode_completion(IDS, None, None, None, None))


def test_what_is_cut_off_or_of_another_layout_is_an_error() -> None:
    content = encode_completion(IDS, LOGPROBS, "stop", None, SPANS)
    for end in range(1, len(content)):
        with pytest.raises(ValueError, match="packed completion"):
            decode_completion(content[:end])
    with pytest.raises(ValueError, match="got layout 1, expected 2"):
        decode_completion(content.replace(b"layout\x02", b"layout\x01"))
    with pytest.raises(ValueError, match="7 bytes, expected a multiple of 4"):
        unpack_ids(IDS[:7])
    with pytest.raises(OverflowError):
        pack_ids([2**31])
