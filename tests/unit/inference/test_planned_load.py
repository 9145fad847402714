"""Updates that are copied by a plan leave what vLLM's loaders would, or they are loaded as usual."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from fakes.stacked_model import (
    COLUMNS,
    HIDDEN,
    PADDED,
    VOCABULARY,
    StackedModel,
    memory_of,
    one_update,
    random_buffers,
    stacked_layout,
)

from pipelinerl.inference.planned_load import COPY_PLAN_VARIABLE, Mode, PlannedLoader
from pipelinerl.weights.layout import UpdateLayout

LAYOUT = stacked_layout()


def update(loader: PlannedLoader, model: torch.nn.Module, layout: UpdateLayout = LAYOUT, seed: int = 0) -> Mode:
    return one_update(loader, model, layout, seed)


def loaded_as_usual(
    layout: UpdateLayout = LAYOUT, seed: int = 0, make: Callable[[], StackedModel] = StackedModel
) -> dict[str, torch.Tensor]:
    model = make()
    for part, buffer in zip(layout.buffers, random_buffers(layout, seed), strict=True):
        model.load_weights(part.unpack(buffer))
    return memory_of(model)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("chunk_bytes", [0, 60, 10**6])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"norm.weight": torch.float32},
        # An odd number of two-byte elements before four-byte ones: their offset fits no view.
        {"norm.weight": torch.float32, "up.weight": torch.float32},
    ],
)
def test_copied_updates_leave_what_the_loaders_leave(
    chunk_bytes: int, rank: int, dtype: torch.dtype, wire: dict[str, torch.dtype]
) -> None:
    """bf16 on the wire goes into fp32 as well; a shard of columns is no dense part of what was received."""
    layout = stacked_layout(chunk_bytes, wire)
    model, loader = StackedModel(dtype, rank), PlannedLoader({})
    modes = []
    for seed in range(4):
        modes.append(update(loader, model, layout, seed))
        assert_equal(memory_of(model), loaded_as_usual(layout, seed, lambda: StackedModel(dtype, rank)))
    assert modes == [Mode.RECORD, Mode.PROVE, Mode.COPY, Mode.COPY]
    # Twice through the loaders, and never again.
    assert model.loads == 2 * len(layout.buffers)


def test_what_a_copied_update_writes_worked_out_by_hand() -> None:
    model, loader = StackedModel(), PlannedLoader({})
    for seed in range(3):
        update(loader, model, seed=seed)
    assert loader.begin(model, LAYOUT) is None and loader.mode is Mode.COPY
    (part,), (buffer,) = LAYOUT.buffers, random_buffers(LAYOUT, seed=9)
    sent = dict(part.unpack(buffer))
    loader.load(model, part, buffer)
    assert torch.equal(model.qkv.weight, torch.cat([sent["q.weight"], sent["k.weight"], sent["v.weight"]]))
    assert torch.equal(model.qkv.bias, torch.cat([sent["q.bias"], sent["k.bias"], sent["v.bias"]]))
    assert torch.equal(model.gate_up.weight, torch.cat([sent["gate.weight"], sent["up.weight"]]))
    assert torch.equal(model.o.weight, sent["o.weight"][:, :COLUMNS])
    padded = torch.cat([sent["embed.weight"], torch.zeros(PADDED - VOCABULARY, HIDDEN, dtype=torch.bfloat16)])
    assert torch.equal(model.head.weight, padded)
    assert torch.equal(model.norm.weight, sent["norm.weight"].float())


def test_a_buffer_may_lie_at_another_address_each_time() -> None:
    model, loader = StackedModel(), PlannedLoader({})
    for seed in range(3):
        update(loader, model, seed=seed)
    (part,), (buffer,) = LAYOUT.buffers, random_buffers(LAYOUT, seed=9)
    room = torch.zeros(buffer.numel() + 64, dtype=torch.uint8)
    inside = room[16 : 16 + buffer.numel()].copy_(buffer)
    loader.begin(model, LAYOUT)
    loader.load(model, part, inside)
    assert_equal(memory_of(model), loaded_as_usual(seed=9))


def twice(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor * 2)


def cast_first(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor.float())


def in_other_memory_order(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor.t().contiguous().t())


def depending_on_values(target: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.sum().item() < 1e30:
        target.copy_(tensor)


def from_elsewhere(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(torch.ones(1))


def as_other_numbers(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor.view(torch.int16))


def added_up(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.add_(tensor)


def into_every_second_column(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target[:, ::2].copy_(tensor[:, ::2])


def kept_beside_it(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)
    torch.zeros(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (twice, r"computes something \(aten\.mul"),
        (cast_first, r"computes something \(aten\._to_copy"),
        (in_other_memory_order, r"computes something \(aten\.clone"),
        (depending_on_values, r"computes something \(aten\.sum"),
        (from_elsewhere, r"computes something \(aten\.ones"),
        (as_other_numbers, "reads k.weight in another way than as a part of it"),
        (added_up, r"computes something \(aten\.add_"),
        (into_every_second_column, r"a part of a parameter with gaps \(size \[2, 2\]\)"),
        (kept_beside_it, r"computes something \(aten\.zeros"),
        (lambda target, tensor: None, r"1 parameters are not filled by copies alone: qkv\.weight"),
        (lambda target, tensor: target.copy_(tensor[:, :1]), None),
    ],
)
def test_loaders_that_do_more_than_copy_are_not_replayed(
    caplog: pytest.LogCaptureFixture, how: Callable[[torch.Tensor, torch.Tensor], object], reason: str | None
) -> None:
    def make() -> StackedModel:
        model = StackedModel()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.loaders["k.weight"] = how
        return model

    model, loader = make(), PlannedLoader({})
    for seed in range(4):
        mode = update(loader, model, seed=seed)
        if how is not added_up:
            assert_equal(memory_of(model), loaded_as_usual(seed=seed, make=make))
        assert mode is (Mode.RECORD if seed == 0 else Mode.USUAL if reason else [Mode.PROVE, Mode.COPY][seed > 1])
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if reason is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert "loaded tensor by tensor" in warning
        assert re.search(reason, warning)


def test_a_write_that_nobody_could_watch_is_found_before_the_plan_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """numpy writes into the memory of a tensor on the CPU without PyTorch; so could a kernel of a loader's own."""

    def write_too(target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor)
        target.numpy()[...] *= 2

    def make() -> StackedModel:
        model = StackedModel(torch.float32)
        model.loaders["k.weight"] = write_too
        return model

    model, loader = make(), PlannedLoader({})
    for seed, mode in enumerate((Mode.RECORD, Mode.PROVE, Mode.USUAL, Mode.USUAL)):
        assert update(loader, model, seed=seed) is mode
        assert_equal(memory_of(model), loaded_as_usual(seed=seed, make=make))
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "copies of buffer 1 gave other weights than the loaders" in error


@pytest.mark.parametrize("same_values", [True, False])
def test_a_plan_that_leaves_a_tensor_out_is_found_also_when_no_value_changed(same_values: bool) -> None:
    model, loader = StackedModel(), PlannedLoader({})
    update(loader, model, seed=0)
    (copies,) = loader._copies.values()
    (group,) = [group for group in copies._groups.values() if group.strided]
    group.strided.clear()
    group.strided_targets.clear()
    seed = 0 if same_values else 1
    assert update(loader, model, seed=seed) is Mode.PROVE
    assert_equal(memory_of(model), loaded_as_usual(seed=seed))
    assert update(loader, model, seed=2) is Mode.USUAL


def test_a_tensor_in_two_places_and_a_place_that_is_written_twice() -> None:
    """The last write counts, as with the loaders."""

    def make() -> StackedModel:
        model = StackedModel()
        whole = model.gate_up.weight.data

        def first_everywhere(target: torch.Tensor, tensor: torch.Tensor) -> None:
            whole[:3].copy_(tensor)
            whole[3:].copy_(tensor)

        model.loaders["gate.weight"] = first_everywhere
        model.loaders["up.weight"] = lambda target, tensor: target[1:].copy_(tensor[1:])
        return model

    for chunk_bytes in (0, 10**6):
        layout = stacked_layout(chunk_bytes)
        model, loader = make(), PlannedLoader({})
        for seed, mode in enumerate((Mode.RECORD, Mode.PROVE, Mode.COPY)):
            assert update(loader, model, layout, seed) is mode
            assert_equal(memory_of(model), loaded_as_usual(layout, seed, make))


@pytest.mark.parametrize("other", [stacked_layout(60), stacked_layout(dtypes={"norm.weight": torch.float32})])
def test_another_layout_is_recorded_anew(other: UpdateLayout) -> None:
    model, loader = StackedModel(), PlannedLoader({})
    for seed in range(3):
        update(loader, model, seed=seed)
    for layout in (other, LAYOUT):
        for seed, mode in enumerate((Mode.RECORD, Mode.PROVE, Mode.COPY)):
            assert update(loader, model, layout, seed) is mode
            assert_equal(memory_of(model), loaded_as_usual(layout, seed))


def move_memory(model: StackedModel) -> None:
    model.qkv.weight.data = model.qkv.weight.data.clone()


def replace_parameter(model: StackedModel) -> None:
    model.qkv.weight = torch.nn.Parameter(model.qkv.weight.detach().clone())


def replace_module(model: StackedModel) -> None:
    model.gate_up = torch.nn.Linear(HIDDEN, 6, bias=False, dtype=torch.bfloat16)


def replace_buffer(model: StackedModel) -> None:
    model.scale = torch.ones(1)


def turn_in_place(model: StackedModel) -> None:
    """Same memory, other shape: a square matrix would not show it."""
    model.o.weight.data = model.o.weight.data.t()


@pytest.mark.parametrize("move", [move_memory, replace_parameter, replace_module, replace_buffer, turn_in_place])
def test_a_model_whose_memory_moved_is_recorded_anew(move: Callable[[StackedModel], None]) -> None:
    model, loader = StackedModel(), PlannedLoader({})
    for seed in range(3):
        update(loader, model, seed=seed)
    move(model)
    for seed, mode in enumerate((Mode.RECORD, Mode.PROVE, Mode.COPY)):
        assert update(loader, model, seed=seed) is mode
        assert_equal(memory_of(model), loaded_as_usual(seed=seed))


def test_another_model_is_recorded_anew() -> None:
    loader = PlannedLoader({})
    for model in (StackedModel(), StackedModel(rank=1)):
        for seed, mode in enumerate((Mode.RECORD, Mode.PROVE, Mode.COPY)):
            assert update(loader, model, seed=seed) is mode


def test_a_loader_that_replaces_a_parameter_is_not_replayed(caplog: pytest.LogCaptureFixture) -> None:
    model, loader = StackedModel(), PlannedLoader({})
    model.loaders["norm.weight"] = lambda target, tensor: setattr(
        model.norm, "weight", torch.nn.Parameter(target.copy_(tensor))
    )
    assert [update(loader, model, seed=seed) for seed in range(3)] == [Mode.RECORD, Mode.USUAL, Mode.USUAL]
    assert "loading gave the model other tensors" in caplog.text


def test_an_update_that_was_cut_short_counts_for_nothing() -> None:
    layout = stacked_layout(60)
    model, loader = StackedModel(), PlannedLoader({})
    for expected in (Mode.RECORD, Mode.PROVE, Mode.COPY):
        loader.begin(model, layout)
        assert loader.mode is expected
        loader.load(model, layout.buffers[0], random_buffers(layout, 7)[0])
        assert update(loader, model, layout, seed=3) is expected
        assert_equal(memory_of(model), loaded_as_usual(layout, 3))


def test_copies_that_fail_are_loaded_as_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader = StackedModel(), PlannedLoader({})
    for seed in range(3):
        update(loader, model, seed=seed)

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(torch, "_foreach_copy_", fail)
    assert [update(loader, model, seed=seed) for seed in (5, 6)] == [Mode.COPY, Mode.USUAL]
    assert_equal(memory_of(model), loaded_as_usual(seed=6))
    assert "the copies of buffer 1 failed" in caplog.text


@pytest.mark.parametrize(("value", "expected"), [("0", Mode.USUAL), ("1", Mode.COPY)])
def test_it_can_be_turned_off(value: str, expected: Mode) -> None:
    model, loader = StackedModel(), PlannedLoader({COPY_PLAN_VARIABLE: value})
    modes = [update(loader, model, seed=seed) for seed in range(3)]
    assert modes[2] is expected
    assert_equal(memory_of(model), loaded_as_usual(seed=2))


def test_a_buffer_of_the_model_that_only_the_loaders_change_is_found() -> None:
    model, loader = StackedModel(), PlannedLoader({})

    def count(target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor)
        model.scale.numpy()[...] += 1

    model.loaders["k.weight"] = count
    assert [update(loader, model, seed=seed) for seed in range(3)] == [Mode.RECORD, Mode.PROVE, Mode.USUAL]
    assert model.scale.item() == 1 + 3
