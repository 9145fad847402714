"""Sealed buffers: values worked out by hand, and every kind of damage is found before anything is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pipelinerl.weights.layout import BufferLayout, plan_layout
from pipelinerl.weights.packing import TensorMeta, pack, packed_bytes, payload_bytes, plan_chunks
from pipelinerl.weights.receiving import DamagedBufferError, receive_buffers
from pipelinerl.weights.seal import BLOCK_WORDS, checksum, mark_of, seal_problem, sealed_bytes

PASS, OTHER_PASS = 1234, 987_654_321
TENSORS = [torch.tensor([1.5, float(i), -2.0], dtype=torch.float32) for i in range(5)]
METAS = [TensorMeta(f"t{i}", torch.float32, (3,)) for i in range(5)]


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_buffer_is_padded_to_whole_words_and_has_eight_bytes_more() -> None:
    assert [sealed_bytes(n) for n in (0, 1, 8, 9, 16)] == [8, 16, 16, 24, 24]


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


def test_a_sealed_buffer_by_hand() -> None:
    # Bytes 1, 2, 3 are the word 0x030201 = 197121; the mark of pass 5, buffer 0, 3 bytes is 17.
    buffer = pack([torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.int8)], mark_of(5, 0, 3))
    assert buffer[:8].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert buffer.view(torch.int64).tolist() == [197_121, 197_138]
    assert seal_problem(buffer, 16, 17) is None
    assert seal_problem(buffer, 16, 19) == "checksum 197121, expected 197119"
    assert seal_problem(torch.zeros_like(buffer), 16, 17) == "checksum 0, expected -17 (all zeros)"
    assert seal_problem(buffer[:8].clone(), 16, 17) == "8 bytes, expected 16"


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
        layout = plan_layout(metas, chunk_bytes)
        receive_buffers(
            "gloo", layout, PASS, lambda _: next(rest), lambda part, buffer: loaded.update(part.unpack(buffer))
        )
    except DamagedBufferError as damage:
        error = str(damage)
    return loaded, error, len(buffers) - len(list(rest))


def test_good_buffers_are_loaded() -> None:
    loaded, error, _ = received(packed(TENSORS, METAS, 0, PASS))
    assert error == ""
    assert all(torch.equal(loaded[meta.name], tensor) for meta, tensor in zip(METAS, TENSORS, strict=True))


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
def test_damage_is_found_nothing_of_it_is_loaded_and_the_rest_is_still_taken(
    damage: Callable[[list[torch.Tensor]], None],
) -> None:
    buffers = packed(TENSORS, METAS, 0, PASS)
    damage(buffers)
    loaded, error, fetched = received(buffers)
    assert error.startswith("gloo: buffer 3 of 5 arrived damaged: ")
    assert error.endswith("; nothing of it or after it was loaded")
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
        receive_buffers("nccl", plan_layout(METAS, 0), PASS, fetch, lambda *_: None)
    assert str(caught.value.__cause__) == "peer is gone"
    with pytest.raises(RuntimeError, match="peer is gone"):
        receive_buffers("nccl", plan_layout(METAS, 0), PASS, fetch, lambda *_: None)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), KeyError("name"), AssertionError()])
def test_behind_a_buffer_that_could_not_be_loaded_the_rest_still_comes(error: Exception) -> None:
    """The other workers and the trainer are in the same broadcasts."""
    rest, tried = iter(packed(TENSORS, METAS, 0, PASS)), []

    def load(part: BufferLayout, buffer: torch.Tensor) -> None:
        tried.append(part.index)
        if part.index == 1:
            raise error

    with pytest.raises(type(error)) as caught:
        receive_buffers("nccl", plan_layout(METAS, 0), PASS, lambda _: next(rest), load)
    assert caught.value is error
    assert tried == [0, 1] and next(rest, None) is None


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


class NewStorages(TorchFunctionMode):
    """Bytes of all storages that operations return and that none of their arguments has: never less than the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.data_ptr() for leaf in storages_of((args, kwargs))}
        self.num_bytes += sum(leaf.nbytes() for leaf in storages_of(result) if leaf.data_ptr() not in known)
        return result


def storages_of(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_packing_takes_memory_for_one_buffer_and_checking_takes_none() -> None:
    """Sums of blocks are all that comes beside the buffer itself."""
    tensors = [torch.ones(250_000) for _ in range(8)]
    metas = [TensorMeta(f"t{i}", torch.float32, (250_000,)) for i in range(8)]
    size, mark = packed_bytes(metas), mark_of(PASS, 0, payload_bytes(metas))

    def allocated(call: Callable[[], object]) -> int:
        with NewStorages() as seen:
            call()
        return seen.num_bytes

    assert size == 8_000_008
    buffer = pack(tensors, mark)
    assert size <= allocated(lambda: pack(tensors, mark)) < 1.01 * size
    assert allocated(lambda: seal_problem(buffer, size, mark)) < 0.01 * size
