"""A plan is proven in time that grows with the bytes of the model alone; nothing that loaders write is overlooked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.stacked_model import StackedModel, memory_of, one_update, random_buffers, stacked_layout
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.inference.planned_load import Mode, PlannedLoader
from pipelinerl.inference.proof import fingerprints
from pipelinerl.weights.layout import UpdateLayout, plan_layout
from pipelinerl.weights.packing import TensorMeta

#: Every tensor in a buffer of its own.
SPLIT = stacked_layout(0)
#: Bytes of a row of a fingerprint's matrix.
ROW = 4096 * 8


def update(loader: PlannedLoader, model: torch.nn.Module, layout: UpdateLayout = SPLIT, seed: int = 0) -> Mode:
    return one_update(loader, model, layout, seed)


def raw(tensor: torch.Tensor) -> Any:
    """The bytes behind `tensor` for numpy, which PyTorch does not see written."""
    return tensor.detach().view(torch.uint8).numpy()


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize(
    ("writer", "written", "found"),
    [
        # Into what an earlier buffer filled: gate_up is changed while buffer 12, the norm, is loaded.
        ("norm.weight", lambda model: model.gate_up.weight.data[:3], "buffer 9"),
        # Into what the present buffer fills, k in qkv.
        ("k.weight", lambda model: model.qkv.weight.data[8:10], "buffer 4"),
        # Beside it in the same parameter, where an earlier buffer had put q.
        ("k.weight", lambda model: model.qkv.weight.data[:8], "buffer 2"),
        # Into what a later buffer fills anyhow: nothing remains of it.
        ("k.weight", lambda model: model.qkv.weight.data[10:], None),
        ("k.weight", lambda model: model.scale, "what no buffer fills"),
    ],
)
def test_what_a_loader_writes_unseen_is_found_wherever_it_is(
    caplog: pytest.LogCaptureFixture,
    writer: str,
    written: Callable[[StackedModel], torch.Tensor],
    found: str | None,
) -> None:
    def make() -> StackedModel:
        model = StackedModel()

        def load(target: torch.Tensor, tensor: torch.Tensor) -> None:
            target.copy_(tensor)
            raw(written(model))[...] += 1

        model.loaders[writer] = load
        return model

    model, usual, loader = make(), make(), PlannedLoader({})
    for seed in range(3):
        mode = update(loader, model, seed=seed)
        for part, buffer in zip(SPLIT.buffers, random_buffers(SPLIT, seed), strict=True):
            usual.load_weights(part.unpack(buffer))
        for name, tensor in memory_of(usual).items():
            assert torch.equal(memory_of(model)[name], tensor), name
    if found is None:
        assert (mode, errors_of(caplog)) == (Mode.COPY, [])
    else:
        assert (mode, errors_of(caplog)) == (
            Mode.USUAL,
            [f"weights: copies of {found} gave other weights than the loaders; not used"],
        )


def test_memory_that_lies_behind_a_parameter_but_not_in_it_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    """The parameter is a part of a larger memory, 6 bytes from its beginning: nothing of it is aligned to 8."""
    model, loader = StackedModel(), PlannedLoader({})
    memory = torch.zeros(100, dtype=torch.bfloat16)
    model.o.weight = torch.nn.Parameter(memory[3:19].view(4, 4))
    for seed in range(3):
        assert update(loader, model, seed=seed) is [Mode.RECORD, Mode.PROVE, Mode.COPY][seed]
    assert not memory[:3].any() and not memory[19:].any()

    def beside(target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor)
        raw(memory)[-1] += 1

    model.loaders["o.weight"] = beside
    loader = PlannedLoader({})
    assert [update(loader, model, seed=seed) for seed in range(3)] == [Mode.RECORD, Mode.PROVE, Mode.USUAL]
    assert "what no buffer fills gave other weights" in errors_of(caplog)[0]


@pytest.mark.parametrize("method", ["begin", "copy", "finish"])
def test_a_device_that_cannot_compare_leaves_the_usual_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    from pipelinerl.inference import proof

    model, loader = StackedModel(), PlannedLoader({})
    update(loader, model)
    calls = {"begin": 0, "copy": 1, "finish": 1 + len(SPLIT.buffers)}[method]
    left = iter(range(calls))

    def fail_later(areas: Any) -> list[torch.Tensor]:
        if next(left, None) is None:
            raise RuntimeError("no kernel for it")
        return fingerprints(areas)

    monkeypatch.setattr(proof, "fingerprints", fail_later)
    assert update(loader, model, seed=1) is (Mode.USUAL if method == "begin" else Mode.PROVE)
    assert len(errors_of(caplog)) == 1
    usual = StackedModel()
    for part, buffer in zip(SPLIT.buffers, random_buffers(SPLIT, 1), strict=True):
        usual.load_weights(part.unpack(buffer))
    for name, tensor in memory_of(usual).items():
        assert torch.equal(memory_of(model)[name], tensor), name
    assert update(loader, model, seed=2) is Mode.USUAL


class WideModel(torch.nn.Module):
    """8 matrices of 4 rows of a fingerprint, and 50 small buffers that no update fills."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            setattr(self, f"m{number}", torch.nn.Linear(256, ROW * 4 // 1024, bias=False))
        for number in range(50):
            self.register_buffer(f"scale{number}", torch.ones(1))

    @torch.no_grad()
    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).weight.data.copy_(tensor)


class Counted(TorchDispatchMode):
    """Counts calls, and the bytes that go into sums."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.summed_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.calls[name] += 1
        if name.startswith("aten::sum"):
            self.summed_bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def test_the_proof_reads_each_byte_a_fixed_number_of_times_and_waits_at_the_end_only() -> None:
    """Sums read every area twice (rows, columns), both after its copies and at the end: four times its bytes."""
    shape = (ROW * 4 // 1024, 256)
    metas = [TensorMeta(f"m{number}", torch.float32, shape) for number in range(8)]
    model_bytes = 8 * 4 * ROW
    read = []
    for chunk_bytes, buffers in ((10**9, 1), (0, 8)):
        layout = plan_layout(metas, chunk_bytes)
        assert len(layout.buffers) == buffers
        model, loader = WideModel(), PlannedLoader({})
        update(loader, model, layout)
        loader.begin(model, layout)
        assert loader.mode is Mode.PROVE
        packed = random_buffers(layout, 1)
        with Counted() as counted:
            for part, buffer in zip(layout.buffers, packed, strict=True):
                loader.load(model, part, buffer)
            assert counted.calls["aten::equal"] == counted.calls["aten::_local_scalar_dense"] == 0
            loader.finish()
        assert counted.calls["aten::equal"] == buffers + 1
        assert counted.calls["aten::_local_scalar_dense"] == 0
        assert update(loader, model, layout) is Mode.COPY
        read.append(counted.summed_bytes)
    # Beside it, for each of 16 matrices and for all small buffers together, few rows.
    assert model_bytes * 4 <= read[0] <= read[1] <= model_bytes * 4 + 17 * 4 * ROW


@pytest.mark.parametrize("offset", [0, 1, 8, 13])
@pytest.mark.parametrize("num_bytes", [1, 7, 8, 100, ROW, 3 * ROW + 21])
def test_a_fingerprint_shows_any_changed_and_exchanged_word(num_bytes: int, offset: int) -> None:
    """Random bytes, so that no two words are alike."""
    memory = torch.randint(0, 256, (num_bytes + 32,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    (before,) = fingerprints([memory[offset : offset + num_bytes]])
    for position in {0, num_bytes // 2, num_bytes - 1}:
        other = memory.clone()
        other[offset + position] ^= 128
        assert not torch.equal(fingerprints([other[offset : offset + num_bytes]])[0], before)
    begin = offset + -offset % 8
    for distance in (8, 2048, ROW, 2 * ROW):
        if begin + distance + 8 <= offset + num_bytes:
            other, there = memory.clone(), begin + distance
            other[begin : begin + 8], other[there : there + 8] = memory[there : there + 8], memory[begin : begin + 8]
            assert not torch.equal(fingerprints([other[offset : offset + num_bytes]])[0], before)


@pytest.mark.parametrize("distance", [2**15, 2**16])
def test_words_that_differ_in_their_highest_bits_only_do_not_change_places_unseen(distance: int) -> None:
    """Factors in arithmetic progression lose the difference: the distance shifts it out of the 64 bits."""
    words = torch.zeros(2**17, dtype=torch.int64)
    words[0], words[distance] = 1 << 49, 3 << 49
    other = words.clone()
    other[0], other[distance] = words[distance], words[0]
    before, after = (fingerprints([tensor.view(torch.uint8)])[0] for tensor in (words, other))
    assert not torch.equal(before, after)


def test_an_area_of_nothing_and_no_area_have_no_numbers() -> None:
    assert fingerprints([]) == []
    (vector,) = fingerprints([torch.zeros(0, dtype=torch.uint8)])
    assert vector.tolist() == []
