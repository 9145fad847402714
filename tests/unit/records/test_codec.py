"""The codec: round trips, the schema check, and numbers that JSON cannot hold."""

from __future__ import annotations

import zlib

import msgspec
import pytest

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
from pipelinerl.records.codec import RecordCodec, decode, encode, with_checksum
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
    assert decode(line, Group) == group(text)


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
        (b'{"source":"s","ste', "not a JSON record"),
        (b"", "not a JSON record"),
        (b"\x00\x00\x00", "not a JSON record"),
        (line('{"source":"\xff","step":1,"time":0.0,"values":{},"schema":2}'), "MetricRecord|UTF-8"),
    ],
)
def test_d5_a_line_that_cannot_be_read_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(StreamError, match=reason):
        decode(data, MetricRecord)


@pytest.mark.parametrize("packed", [False, True])
def test_d5_every_changed_byte_is_noticed(packed: bool) -> None:
    codec = RecordCodec[Group](Group, packed=packed)
    data = codec.encode(group())
    for place in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[place] ^= bit
            with pytest.raises(StreamError):
                codec.decode(bytes(damaged))


def test_fields_in_another_order_are_read() -> None:
    data = line('{"schema":2,"values":{"a":2.0},"time":0.0,"step":1,"source":"s"}')
    assert decode(data, MetricRecord).values == {"a": 2.0}


def test_experts_and_other_inputs_have_a_place_and_take_no_room() -> None:
    assert b"routed" not in encode(group()) and b"multimodal" not in encode(group())
    experts = Array("uint8", [3, 1, 2], bytes(range(6)))
    sample = arrays(routed_experts=experts, multimodal={"pixel_values": Array("<f4", [1], b"\x00" * 4)})
    record = msgspec.structs.replace(group(), samples=[sample])
    for codec in (PACKED, RecordCodec[Group](Group)):
        assert codec.decode(codec.encode(record)) == record


def arrays(**changed: object) -> Sample:
    return msgspec.structs.replace(group().samples[0], **changed)


PACKED = RecordCodec[Group](Group, packed=True)


@pytest.mark.parametrize(
    "sample",
    [
        arrays(),
        arrays(labels=[-100, 9, 7]),  # says more than which tokens are trained
        arrays(labels=[-100, -100, -100], logprobs=[], version_spans=[]),
        arrays(labels=[5, -100, 7]),
        arrays(labels=[5, 6]),
        arrays(input_ids=[], labels=[]),
        arrays(input_ids=[2**31, -(2**40), 0], labels=[-100, -100, 0]),
        arrays(logprobs=[-0.1, -1e-300], ref_logprobs=[0.5, -0.0]),
        arrays(logprobs=[-1e39, 0.0]),
        arrays(metadata={"bytes": "\xff", "null": None, "deep": [{"a": [1.5]}]}),
    ],
)
def test_a_packed_record_is_equal_in_every_bit(sample: Sample) -> None:
    record = msgspec.structs.replace(group(), samples=[sample, group().samples[0]])
    data = PACKED.encode(record)
    for codec in (PACKED, RecordCodec[Group](Group)):
        assert codec.decode(data) == record
        assert encode(codec.decode(data)) == encode(record)
        assert codec.decode(encode(record)) == record


def test_a_packed_record_holds_arrays_as_bytes() -> None:
    ids = list(range(1000, 5096))
    sample = arrays(input_ids=ids, labels=[-100] * 96 + ids[96:], logprobs=[-0.5] * 4000)
    raw = msgspec.msgpack.decode(PACKED.encode(msgspec.structs.replace(group(), samples=[sample]))[:-4])
    assert raw["schema"] == SCHEMA_VERSION
    assert raw["samples"][0]["labels"] == b"m" + (96).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    assert len(raw["samples"][0]["input_ids"]) == 1 + 4 * 4096
    assert len(raw["samples"][0]["logprobs"]) == 1 + 4 * 4000


class SampleHead(msgspec.Struct):
    id: str
    input_ids: list[int]


class GroupHead(msgspec.Struct, kw_only=True):
    samples: list[SampleHead]
    schema: int = SCHEMA_VERSION


def test_fields_of_a_packed_record_can_be_left_out() -> None:
    head = decode(PACKED.encode(group()), GroupHead)
    assert head == GroupHead(samples=[SampleHead("0-1/r0/s0", [5, 6, 7])])


def test_a_packed_union_and_a_packed_batch() -> None:
    codec = RecordCodec[TrainerMessage](TrainerMessage, packed=True)
    message = StepDone(step=1, time=2.0, group_ids=["g"], num_samples=8, samples_processed=8)
    assert codec.decode(codec.encode(message)) == message
    batch = TrainingBatch(
        id="b",
        step=1,
        samples=[
            msgspec.structs.replace(arrays(), advantage=0.1),
            msgspec.structs.replace(arrays(), advantage=-0.25),
        ],
        group_ids=["0-1"],
        plan=[[[0, 1]]],
        actor_offset=3,
    )
    batches = RecordCodec[TrainingBatch](TrainingBatch, packed=True)
    assert batches.decode(batches.encode(batch)) == batch
    assert decode(encode(batch), TrainingBatch) == batch


def test_what_is_no_number_is_refused_in_packed_records() -> None:
    with pytest.raises(StreamError, match=r"cannot write a Group: Sample\.input_ids"):
        PACKED.encode(msgspec.structs.replace(group(), samples=[arrays(input_ids=["a"])]))
    with pytest.raises(StreamError, match=r"cannot write a Group: Sample\.input_ids"):
        PACKED.encode(msgspec.structs.replace(group(), samples=[arrays(input_ids=[2**70])]))


def packed_data(value: object) -> bytes:
    data = msgspec.msgpack.encode(value)
    return data + zlib.crc32(data).to_bytes(4, "little")


def _packed(**changed: object) -> bytes:
    raw = msgspec.msgpack.decode(PACKED.encode(group())[:-4])
    for key, value in changed.items():
        raw["samples"][0][key] = value
    return packed_data(raw)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed_data({"id": "g"}), "no schema.*reads schema 2"),
        (packed_data({"id": "g", "schema": 7}), "schema 7.*version of pipelinerl that wrote"),
        (msgspec.msgpack.encode({"id": "g", "schema": 1}), "schema 1, this version reads schema 2"),
        (packed_data({"schema": 7, "x": {"schema": 2}}), "schema 7|not a Group"),
        (PACKED.encode(group())[:-3], "damaged"),
        (b"\x80", "no schema"),
        (_packed(input_ids=b"x1234"), "bytes that are no array"),
        (_packed(input_ids=b"i123"), "bytes that are no array"),
        (_packed(input_ids=[5, 6, 7]), "not a Group"),
        (_packed(labels=b"m" + bytes([2, 0, 0, 0, 9, 0, 0, 0])), r"trained tokens \[2, 9\) of 3"),
        (_packed(labels=b"m" + bytes([2, 0, 0, 0])), "bytes that are no array"),
    ],
)
def test_a_packed_record_that_cannot_be_read_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(StreamError, match=reason):
        PACKED.decode(data)


class NoSchema(msgspec.Struct):
    a: int


@pytest.mark.parametrize("bad", [NoSchema, int, dict[str, int], MetricRecord | int])
def test_types_that_are_not_records_are_refused(bad: object) -> None:
    with pytest.raises(StreamError, match="cannot go on a stream"):
        RecordCodec(bad)
