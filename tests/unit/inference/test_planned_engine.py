"""A transfer engine that loads in place: what it works out once, and what it copies; on a CPU, with doubles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.stacked_model import SHAPES, StackedModel, memory_of, random_buffers, stacked_layout
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.platforms import current_platform

from pipelinerl.inference import reload
from pipelinerl.inference.in_place import can_load_in_place
from pipelinerl.inference.nccl_engine import NCCLWeightTransferEngine
from pipelinerl.inference.planned_load import COPY_PLAN_VARIABLE
from pipelinerl.inference.reload import IncompleteUpdateError
from pipelinerl.weights.receiving import DamagedBufferError
from pipelinerl.weights.seal import mark_of, write_seal

# What it imports looks at the device: read it before a test says that this is a GPU.
can_load_in_place(torch.nn.Linear(1, 1), {})

CHUNK_BYTES = 60
PASS = 5


class Wire:
    """Group and stream in one. What is sent is there at once, or only when somebody waits for it."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.events: list[str] = []
        self.is_fast = False

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.start(buffer)()

    def start(self, buffer: torch.Tensor) -> Callable[[], None]:
        self.events.append("start")
        sent = self.buffers.pop(0)

        def end() -> None:
            self.events.append("end")
            buffer.copy_(sent)

        if self.is_fast:
            buffer.copy_(sent)
        return end

    def synchronize(self) -> None:
        """Nothing is under way on a CPU, but this is where a buffer has been loaded."""
        self.events.append("loaded")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    wire = Wire()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: wire)
    engine: Any = object.__new__(NCCLWeightTransferEngine)
    engine.model, engine._group, engine.device = StackedModel(), wire, torch.device("cpu")
    engine._chunk_bytes = CHUNK_BYTES
    hf_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=True))
    engine.model_config = SimpleNamespace(model=str(tmp_path), revision=None, hf_config=hf_config)
    return engine


def update(engine: Any, seed: int, damaged: int | None = None, left_out: str | None = None) -> None:
    """One whole update with the buffers of `seed`."""
    layout = stacked_layout(CHUNK_BYTES)
    buffers = list(random_buffers(layout, seed))
    for part, buffer in zip(layout.buffers, buffers, strict=True):
        write_seal(buffer, mark_of(PASS, part.index, part.payload_bytes))
    if damaged is not None:
        buffers[damaged] = torch.zeros_like(buffers[damaged])
    names = [name for name in SHAPES if name != left_out]
    info = {"names": names, "dtype_names": ["bfloat16"] * len(names), "pass_id": PASS}
    info["shapes"] = [list(SHAPES[name]) for name in names]
    engine._group.buffers = buffers
    engine.start_weight_update()
    engine.receive_weights(engine.parse_update_info(info))
    engine.finish_weight_update()


def assert_loaded(engine: Any, seed: int) -> None:
    layout, model = stacked_layout(CHUNK_BYTES), StackedModel()
    for part, buffer in zip(layout.buffers, random_buffers(layout, seed), strict=True):
        model.load_weights(part.unpack(buffer))
    for name, tensor in memory_of(model).items():
        assert torch.equal(memory_of(engine.model)[name], tensor), name


def test_from_the_third_update_on_nothing_goes_through_the_loaders(engine: Any) -> None:
    buffers = len(stacked_layout(CHUNK_BYTES).buffers)
    for seed, loads in enumerate((buffers, 2 * buffers, 2 * buffers, 2 * buffers)):
        update(engine, seed)
        assert engine.model.loads == loads
        assert_loaded(engine, seed)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_buffer_is_on_its_way_while_the_one_before_is_copied_into_place(engine: Any, is_fast: bool) -> None:
    """Never while loaders take memory, which may wait for the whole device. Two rooms are enough, sizes differ."""
    engine._group.is_fast = is_fast
    buffers = len(stacked_layout(CHUNK_BYTES).buffers)
    assert buffers > 3
    for seed in range(4):
        del engine._group.events[:]
        update(engine, seed)
        assert_loaded(engine, seed)
        if seed < 2:
            assert engine._group.events == ["start", "end", "loaded"] * buffers
        else:
            assert engine._group.events == ["start", *["end", "start", "loaded"] * (buffers - 1), "end", "loaded"]


def test_without_memory_for_two_buffers_one_comes_after_the_other(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        update(engine, seed)
    empty, calls, two_rooms = torch.empty, [], engine._two_rooms

    def tight(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*args, **kwargs)

    def without_memory(layout: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", tight)
            return two_rooms(layout)

    engine._two_rooms = without_memory
    del engine._group.events[:]
    update(engine, 2)
    assert_loaded(engine, 2)
    assert len(calls) == 2
    assert engine._group.events == ["start", "end", "loaded"] * len(stacked_layout(CHUNK_BYTES).buffers)


@pytest.mark.parametrize("damaged", [0, 1, -1])
def test_after_a_damaged_buffer_the_rest_is_taken_also_when_it_comes_ahead(engine: Any, damaged: int) -> None:
    for seed in range(3):
        update(engine, seed)
    del engine._group.events[:]
    buffers = len(stacked_layout(CHUNK_BYTES).buffers)
    with pytest.raises(DamagedBufferError, match=f"nccl: buffer {damaged % buffers + 1} of"):
        update(engine, 7, damaged=damaged)
    events = engine._group.events
    assert engine._group.buffers == []
    assert (events.count("start"), events.count("end")) == (buffers, buffers)
    assert events.count("loaded") == damaged % buffers
    update(engine, 8)
    assert_loaded(engine, 8)


def test_what_the_model_and_the_update_look_like_is_worked_out_once(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        original = getattr(reload, name)
        monkeypatch.setattr(reload, name, lambda *args: (calls.append(name), original(*args))[1])

    for name in ("can_load_in_place", "checkpoint_tensors", "missing_from_update"):
        counted(name)
    for seed in range(3):
        update(engine, seed)
    assert sorted(calls) == ["can_load_in_place", "checkpoint_tensors", "missing_from_update"]
    engine.model = StackedModel()
    update(engine, 4)
    assert len(calls) == 6
    assert_loaded(engine, 4)


def test_damaged_and_incomplete_updates_are_refused_as_ever(engine: Any) -> None:
    for seed in range(3):
        update(engine, seed)
    before = memory_of(engine.model)
    with pytest.raises(DamagedBufferError, match="nccl: buffer 1 of"):
        update(engine, 7, damaged=0)
    for name, tensor in before.items():
        assert torch.equal(memory_of(engine.model)[name], tensor)
    for _ in range(2):
        with pytest.raises(IncompleteUpdateError, match=r"left out: k\.bias"):
            update(engine, 7, left_out="k.bias")
    update(engine, 8)
    assert_loaded(engine, 8)


def test_the_variable_turns_plans_off(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COPY_PLAN_VARIABLE, "0")
    for seed in range(3):
        update(engine, seed)
        assert engine.model.loads == (seed + 1) * len(stacked_layout(CHUNK_BYTES).buffers)
    assert_loaded(engine, 2)
