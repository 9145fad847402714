"""The codec: round trips, the schema check, and numbers that JSON cannot hold."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from fakes.short_sample import encode

from pipelinerl.errors import StreamError
from pipelinerl.records import (
    SCHEMA_VERSION,
    Group,
    MetricRecord,
    RolloutSummary,
    Sample,
    StepDone,
    TrainerMessage,
    TrainingBatch,
    TrainingDone,
    VersionSpan,
    WeightUpdateSuccess,
)
from pipelinerl.records.codec import RecordCodec, with_checksum
from pipelinerl.records.sample import Array


def metric(**values: float) -> MetricRecord:
    return MetricRecord(source="finetune_0", step=3, time=1.5, values=values)


def group(text: str = "x", logprob: float = -0.25) -> Group:
    sample = Sample(
        id="0-1/r0/s0",
        group_id="0-1",
        rollout_id="0-1/r0",
        input_ids=[5, 6, 7],
        labels=[-100, 6, 7],
        logprobs=[logprob, -1e-7],
        reward=1.0,
        finished=True,
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=2,
        version_spans=[VersionSpan(3, 0, 2)],
        metadata={"text": text, "nothing": None},
    )
    summary = RolloutSummary(
        rollout_id="0-1/r0", reward=1.0, success=True, num_samples=1, output_tokens=2, latency_s=0.5
    )
    return Group(id="0-1", problem_id="p", dataset_name="d", samples=[sample], rollouts=[summary])


@pytest.mark.parametrize("text", ["plain", "two\nlines", "\x00 null", "emoji \U0001f600", '"schema":2}', "\u2028"])
def test_a_group_comes_back_equal_and_stays_one_line(text: str) -> None:
    line = encode(group(text))
    assert b"\n" not in line and b"\x00" not in line
    assert RecordCodec[Group](Group).decode(line) == group(text)


def test_a_line_is_readable_json_with_the_schema() -> None:
    assert msgspec.json.decode(encode(metric(a=0.5))) == {
        "source": "finetune_0",
        "step": 3,
        "time": 1.5,
        "values": {"a": 0.5},
        "schema": SCHEMA_VERSION,
        "crc": f"{zlib.crc32(encode(metric(a=0.5))[:-18]):08x}",
    }


def test_a_union_finds_the_right_message() -> None:
    codec = RecordCodec[TrainerMessage](TrainerMessage)
    messages: list[TrainerMessage] = [
        WeightUpdateSuccess(version=0, time=1.0, seconds={"total": 0.1}, num_servers=2),
        StepDone(step=1, time=2.0, group_ids=["g"], num_samples=8, samples_processed=8),
        TrainingDone(version=1, time=3.0, samples_processed=8),
    ]
    assert [codec.decode(codec.encode(message)) for message in messages] == messages


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_refused_with_their_path(bad: float) -> None:
    with pytest.raises(StreamError, match=r"samples\[0\]\.logprobs\[0\] is"):
        encode(group(logprob=bad))
    with pytest.raises(StreamError, match=r"values\['loss'\] is"):
        encode(metric(loss=bad))


def test_another_type_is_refused() -> None:
    with pytest.raises(StreamError, match="cannot write a MetricRecord: this stream holds Group"):
        RecordCodec(Group).encode(metric())


def test_values_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(StreamError, match="cannot write a MetricRecord"):
        encode(MetricRecord(source="s", step=0, time=0.0, values={"a": object()}))  # type: ignore[dict-item]


def line(text: str) -> bytes:
    return with_checksum(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"source":"s","step":1,"time":0.0,"values":{}}', "no schema.*reads schema 2"),
        (b'{"source":"s","step":1,"time":0.0,"values":{},"schema":1}', "schema 1.*version of pipelinerl that wrote"),
        (line('{"source":"s","step":1,"time":0.0,"values":{},"schema":7}'), "schema 7"),
        (line('{"source":"s","step":1,"time":0.0,"values":{"schema":2},"schema":0}'), "schema 0"),
        (line('{"source":"s","step":"one","time":0.0,"values":{},"schema":2}'), r"\$\.step"),
        (b'{"source":"s","step":1,"time":0.0,"values":{},"schema":2}', "damaged: no checksum"),
        (b'{"source":"s","ste', "not a MetricRecord"),
        (b"", "not a MetricRecord"),
        (b"\x00\x00\x00", "not a MetricRecord"),
        (line('{"source":"\xff","step":1,"time":0.0,"values":{},"schema":2}'), "MetricRecord|UTF-8"),
    ],
)
def test_d5_a_line_that_cannot_be_read_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(StreamError, match=reason):
        RecordCodec[MetricRecord](MetricRecord).decode(data)


def test_d5_every_changed_byte_is_noticed() -> None:
    codec = RecordCodec[Group](Group)
    data = codec.encode(group())
    for place in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[place] ^= bit
            with pytest.raises(StreamError):
                codec.decode(bytes(damaged))


def test_fields_in_another_order_are_read() -> None:
    data = line('{"schema":2,"values":{"a":2.0},"time":0.0,"step":1,"source":"s"}')
    assert RecordCodec[MetricRecord](MetricRecord).decode(data).values == {"a": 2.0}


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": [-100, -100, -100], "logprobs": [], "version_spans": []},
        {"input_ids": [2**31, -(2**40), 0], "labels": [-100, -100, 0]},
        {"logprobs": [-0.1, -1e-300], "ref_logprobs": [0.5, -0.0]},
        {"logprobs": [-1e39, 0.0], "advantage": 0.1},
        {"routed_experts": Array("uint8", [3, 1, 2], bytes(range(6))), "multimodal": {}},
        {"metadata": {"bytes": "\xff", "null": None, "deep": [{"a": [1.5]}]}},
    ],
)
def test_a_sample_is_equal_in_every_bit(changed: dict[str, object]) -> None:
    sample = msgspec.structs.replace(group().samples[0], **changed)
    record = TrainingBatch(id="b", step=1, samples=[sample], group_ids=["0-1"], plan=[[[0]]], actor_offset=3)
    again = RecordCodec[TrainingBatch](TrainingBatch).decode(encode(record))
    assert again == record and encode(again) == encode(record)
    assert repr(again.samples[0].ref_logprobs) == repr(sample.ref_logprobs)  # the sign of 0 too


class NoSchema(msgspec.Struct):
    a: int


@pytest.mark.parametrize("bad", [NoSchema, int, dict[str, int], MetricRecord | int])
def test_types_that_are_not_records_are_refused(bad: object) -> None:
    with pytest.raises(StreamError, match="cannot go on a stream"):
        RecordCodec(bad)
