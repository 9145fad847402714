"""Packed buffers with values worked out by hand; every kind of damage is found before anything is loaded."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights import buffers
from pipelinerl.weights.buffers import (
    BLOCK_WORDS,
    DamagedBufferError,
    ModuleSource,
    NamedTensors,
    TensorMeta,
    WeightSource,
    checksum,
    checksum_problem,
    exportable_memory,
    mark_of,
    metas_of,
    pack,
    packed_buffers,
    packed_bytes,
    payload_bytes,
    plan_chunks,
    receive_buffers,
    unpack,
    update_info_of,
)

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PASS, OTHER_PASS = 1234, 987_654_321
TENSORS = [torch.tensor([1.5, float(i), -2.0], dtype=torch.float32) for i in range(5)]
METAS = [TensorMeta(f"t{i}", torch.float32, (3,)) for i in range(5)]
LARGEST_FLOAT16 = 65504.0


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(name, dtype, shape)


def test_a_buffer_is_closed_by_the_tensor_that_makes_it_exceed_the_limit() -> None:
    # 8, 4, 4, 40 and 4 bytes; the limit is 12: 8 + 4 does not exceed it, 8 + 4 + 4 does.
    metas = [meta("a", 2), meta("b", 1), meta("c", 1), meta("d", 10), meta("e", 1)]
    assert [[m.name for m in chunk] for chunk in plan_chunks(metas, 12)] == [["a", "b", "c"], ["d"], ["e"]]
    assert [len(chunk) for chunk in plan_chunks(metas, 10**9)] == [5]
    assert [len(chunk) for chunk in plan_chunks(metas, 0)] == [1] * 5
    assert list(plan_chunks([], 12)) == []


def test_strided_tensors_and_mixed_dtypes_survive_packing() -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = [
        torch.tensor([1.5], dtype=torch.bfloat16),  # two bytes: what follows is not aligned to four
        base.t(),
        base[:, 1],
        torch.tensor(7.0),
        torch.tensor([2**40], dtype=torch.int64),
    ]
    metas = [meta(f"t{i}", *t.shape, dtype=t.dtype) for i, t in enumerate(tensors)]
    buffer = pack(tensors, mark=1)
    # 74 bytes, 6 up to a multiple of 8, and the checksum
    assert buffer.numel() == 2 + 48 + 12 + 4 + 8 + 6 + 8
    for (name, got), expected in zip(unpack(buffer, metas), tensors, strict=True):
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("dtype", ["float99", "nn"])
def test_bad_descriptions_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=dtype):
        metas_of([("a", dtype, [1])])


def test_what_a_worker_is_told_names_the_same_tensors() -> None:
    info = json.loads(json.dumps(update_info_of(METAS, 12, PASS)))
    assert metas_of(info["tensors"]) == METAS
    assert (info["chunk_bytes"], info["pass_id"]) == (12, PASS)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_buffer_is_padded_to_whole_words_and_has_eight_bytes_more() -> None:
    sizes = [packed_bytes([meta("a", n, dtype=torch.uint8)]) for n in (0, 1, 8, 9, 16)]
    assert sizes == [8, 16, 16, 24, 24]


def test_marks_by_hand() -> None:
    # 2 * (pass + index * 2**40 + bytes) + 1, as a signed number of 64 bits
    assert mark_of(0, 0, 0) == 1
    assert mark_of(5, 0, 3) == 17
    assert mark_of(0, 1, 0) == 2**41 + 1
    assert mark_of(2**62, 0, 0) == -(2**63) + 1
    assert mark_of(2**63 - 1, 0, 0) == -1
    assert mark_of(2**63 - 1, 0, 1) == 1


def test_checksums_by_hand() -> None:
    assert checksum(words()).item() == 0
    assert checksum(words(3, -5, 100)).item() == 98
    # Addition wraps around.
    assert checksum(words(2**63 - 1, 1)).item() == -(2**63)
    # Blocks have the factors 1, 3, 5: 1 * 4096 * 1 + 3 * 4096 * 2 + 5 * 7
    blocks = torch.cat([torch.ones(BLOCK_WORDS), torch.full((BLOCK_WORDS,), 2), torch.tensor([7])]).long()
    assert checksum(blocks).item() == 28_707


def test_a_packed_buffer_by_hand() -> None:
    # Bytes 1, 2, 3 are the word 0x030201 = 197121; the mark of pass 5, buffer 0, 3 bytes is 17.
    buffer = pack([torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.int8)], mark_of(5, 0, 3))
    assert buffer[:8].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert buffer.view(torch.int64).tolist() == [197_121, 197_138]
    assert checksum_problem(buffer, 16, 17) is None

    def numbers(buffer: torch.Tensor, mark: int) -> list[str]:
        return re.findall(r"-?\d+", checksum_problem(buffer, 16, mark) or "")

    assert numbers(buffer, 19) == ["197121", "197119"]
    assert numbers(torch.zeros_like(buffer), 17) == ["0", "-17"]
    assert numbers(buffer[:8].clone(), 17) == ["8", "16"]


def packed(tensors: list[torch.Tensor], metas: list[TensorMeta], chunk_bytes: int, pass_id: int) -> list[torch.Tensor]:
    buffers, rest = [], iter(tensors)
    for index, chunk in enumerate(plan_chunks(metas, chunk_bytes)):
        mark = mark_of(pass_id, index, payload_bytes(chunk))
        buffers.append(pack(list(itertools.islice(rest, len(chunk))), mark))
    return buffers


def received(
    buffers: list[torch.Tensor], metas: list[TensorMeta] = METAS, chunk_bytes: int = 0
) -> tuple[dict[str, torch.Tensor], str, int]:
    """What was loaded, the error, and the number of buffers that were fetched."""
    loaded: dict[str, torch.Tensor] = {}
    rest = iter(buffers)
    error = ""
    try:
        receive_buffers(metas, chunk_bytes, PASS, lambda _: next(rest), loaded.update)
    except DamagedBufferError as damage:
        error = str(damage)
    return loaded, error, len(buffers) - len(list(rest))


def one_byte(buffers: list[torch.Tensor]) -> None:
    buffers[2][5] ^= 1


def zeros(buffers: list[torch.Tensor]) -> None:
    buffers[2].zero_()


def zero_payload(buffers: list[torch.Tensor]) -> None:
    buffers[2][:-8] = 0


def swapped(buffers: list[torch.Tensor]) -> None:
    buffers[2], buffers[3] = buffers[3], buffers[2]


def of_an_earlier_pass(buffers: list[torch.Tensor]) -> None:
    # The same values: only the number of the pass tells them apart.
    buffers[2] = packed(TENSORS, METAS, 0, OTHER_PASS)[2]


def cut_off(buffers: list[torch.Tensor]) -> None:
    buffers[2] = buffers[2][:16].clone()


@pytest.mark.parametrize("damage", [one_byte, zeros, zero_payload, swapped, of_an_earlier_pass, cut_off])
def test_damage_is_found_nothing_of_it_is_loaded_and_the_rest_is_still_received(
    damage: Callable[[list[torch.Tensor]], None],
) -> None:
    buffers = packed(TENSORS, METAS, 0, PASS)
    damage(buffers)
    loaded, error, fetched = received(buffers)
    assert re.match(r"buffer 3 of 5\b", error)
    assert ("all zeros" in error) == (damage is zeros)
    assert (list(loaded), fetched) == (["t0", "t1"], 5)


def test_a_flip_of_any_bit_is_found() -> None:
    metas = METAS[:1]
    (good,) = packed(TENSORS[:1], metas, 0, PASS)
    for byte, bit in itertools.product(range(good.numel()), range(8)):
        damaged = good.clone()
        damaged[byte] ^= 1 << bit
        assert "arrived damaged" in received([damaged], metas)[1], (byte, bit)


def test_exchanged_blocks_of_one_buffer_are_found() -> None:
    tensor = torch.arange(3 * 2 * BLOCK_WORDS, dtype=torch.float32)
    metas = [TensorMeta("a", torch.float32, tuple(tensor.shape))]
    (buffer,) = packed([tensor], metas, 0, PASS)
    blocks = buffer[:-8].view(3, -1)
    blocks[[0, 2]] = blocks[[2, 0]].clone()
    assert "arrived damaged" in received([buffer], metas)[1]


def test_an_end_of_the_transfer_after_damage_does_not_hide_the_damage() -> None:
    buffers = packed(TENSORS, METAS, 0, PASS)
    zeros(buffers)
    rest = iter(buffers[:4])

    def fetch(num_bytes: int) -> torch.Tensor:
        buffer = next(rest, None)
        if buffer is None:
            raise RuntimeError("peer is gone")
        return buffer

    with pytest.raises(DamagedBufferError, match="buffer 3 of 5") as caught:
        receive_buffers(METAS, 0, PASS, fetch, lambda *_: None)
    assert str(caught.value.__cause__) == "peer is gone"
    with pytest.raises(RuntimeError, match="peer is gone"):
        receive_buffers(METAS, 0, PASS, fetch, lambda *_: None)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), KeyError("name"), AssertionError()])
def test_after_a_buffer_that_could_not_be_loaded_the_rest_is_still_received(error: Exception) -> None:
    """The other workers and the trainer are in the same broadcasts."""
    rest, tried = iter(packed(TENSORS, METAS, 0, PASS)), []

    def load(tensors: NamedTensors) -> None:
        tried.append(tensors[0][0])
        if tensors[0][0] == "t1":
            raise error

    with pytest.raises(type(error)) as caught:
        receive_buffers(METAS, 0, PASS, lambda _: next(rest), load)
    assert caught.value is error
    assert tried == ["t0", "t1"] and next(rest, None) is None


@pytest.mark.parametrize("chunk_bytes", [0, 11, 10**6])
def test_every_size_of_element_in_every_order_and_odd_numbers_of_bytes(chunk_bytes: int) -> None:
    kinds = [
        torch.tensor([True, False, True]),
        torch.tensor([[1.5], [-2.25]], dtype=torch.bfloat16).t(),
        torch.tensor([3.5, 1e-30, -7.0]),
        torch.tensor([2**40 + 1, -1]),
        torch.zeros(0, 4),
    ]
    for tensors in itertools.permutations(kinds):
        metas = [TensorMeta(f"t{i}", t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
        loaded, error, _ = received(packed(list(tensors), metas, chunk_bytes, PASS), metas, chunk_bytes)
        assert error == ""
        assert all(torch.equal(loaded[m.name], t) for m, t in zip(metas, tensors, strict=True))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(2)


def test_a_module_source_casts_renames_and_sends_shared_parameters_once() -> None:
    module = Tied()
    names = {"embed.weight": "model.embed.weight", "norm.weight": "norm.weight", "norm.bias": None}
    source = ModuleSource(module, dtype=torch.bfloat16, rename=lambda name: names[name])
    assert source.metadata() == [
        TensorMeta("model.embed.weight", torch.bfloat16, (3, 2)),
        TensorMeta("norm.weight", torch.bfloat16, (2,)),
    ]
    for _ in range(2):  # every pass is fresh
        buckets = list(source.buckets())
        assert [[name for name, _ in bucket] for bucket in buckets] == [["model.embed.weight"], ["norm.weight"]]
    with torch.no_grad():
        module.embed.weight.fill_(2)
    assert (next(source.buckets())[0][1] == 2).all()


def test_a_collective_source_makes_followers_take_part_in_every_pass() -> None:
    flags: list[bool] = []
    leader = WeightSource([meta("a", 1)], lambda: [[("a", torch.ones(1))]], lambda flag: flags.append(flag) or flag)
    for _ in range(2):
        assert [name for bucket in leader.buckets() for name, _ in bucket] == ["a"]
    leader.done()
    assert flags == [True, True, False]

    passes: list[int] = []
    heard = iter(flags)
    follower = WeightSource([meta("a", 1)], lambda: passes.append(1) or iter([[]]), lambda _: next(heard))
    follower.follow()
    assert len(passes) == 2


def packed_in_half(model: torch.nn.Module, dtype: torch.dtype, servers: tuple[str, ...]) -> list[torch.Tensor]:
    source = ModuleSource(model, dtype=dtype)
    return list(packed_buffers(source, source.metadata(), 2**20, 1, servers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [70000.0, -1e30, float("inf"), float("nan")])
def test_a_value_beyond_float16_is_refused_by_name(dtype: torch.dtype, value: float) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias[1] = value
    with pytest.raises(WeightSyncError, match=r"actor_llm_0, actor_llm_1.*: bias has .*at most 65504: use vllm_config"):
        packed_in_half(model, dtype, ("actor_llm_0", "actor_llm_1"))
    assert packed_in_half(model, dtype, ())


def test_the_largest_float16_value_passes() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(-LARGEST_FLOAT16)
    (buffer,) = packed_in_half(model, torch.float32, ("actor_llm_0",))
    assert float(buffer[:4].view(torch.float32)) == -LARGEST_FLOAT16


def test_a_refused_pass_over_a_sharded_model_is_read_to_its_end() -> None:
    metas = [TensorMeta(name, torch.float32, (1,)) for name in "abc"]
    taken = []

    def gather() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for meta in metas:
            yield [(meta.name, torch.tensor([1e6]))]
            taken.append(meta.name)

    source = WeightSource(metas, gather, lambda flag: flag)
    with pytest.raises(WeightSyncError, match="a has a value of 1e"):
        list(packed_buffers(source, metas, 1, 1, ("actor_llm_0",)))
    assert taken == ["a", "b", "c"]


class OnGPU:
    """Stands for a buffer of a GPU."""

    is_cuda = True
    device = "cuda:3"


def test_the_packing_stream_is_waited_for_before_a_buffer_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            calls.append("complete")

    def pack(*_: Any) -> OnGPU:
        calls.append("pack")
        return OnGPU()

    def current_stream(device: str) -> Stream:
        assert device == "cuda:3"
        return Stream()

    monkeypatch.setattr(buffers, "pack", pack)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    source = ModuleSource(torch.nn.Linear(4, 4))
    for _ in packed_buffers(source, source.metadata(), chunk_bytes=1, pass_id=1):
        calls.append("given out")
    assert calls == ["pack", "complete", "given out"] * 2


@pytest.mark.parametrize(
    ("environ", "device", "expected"),
    [
        (("expandable_segments:True", None), "cuda", ["expandable_segments:False", "expandable_segments:True"]),
        (
            (None, "max_split_size_mb:64, expandable_segments: True"),
            "cuda",
            ["max_split_size_mb:64, expandable_segments:False", "max_split_size_mb:64, expandable_segments: True"],
        ),
        (("", "expandable_segments:True"), "cuda", []),
        (("max_split_size_mb:64", None), "cuda", []),
        ((None, None), "cuda", []),
        (("expandable_segments:True", None), "cpu", []),
    ],
)
def test_what_is_exported_lies_in_no_expandable_segment(
    monkeypatch: pytest.MonkeyPatch, environ: tuple[str | None, str | None], device: str, expected: list[str]
) -> None:
    """The user's other settings stay, and all come back after an error."""
    changes: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append)
    for key, value in zip(SETTINGS, environ, strict=True):
        monkeypatch.delenv(key, raising=False)
        if value is not None:
            monkeypatch.setenv(key, value)
    with pytest.raises(MemoryError), exportable_memory(torch.device(device)):
        assert changes == expected[:1]
        raise MemoryError
    assert changes == expected


def test_pytorchs_allocator_has_the_setting() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    with pytest.raises(ValueError):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:No")
