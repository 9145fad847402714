"""The NCCL engine's own part, on a CPU: stream and device are doubles that note the order of what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from pipelinerl.inference.nccl_engine import NCCLWeightTransferEngine
from pipelinerl.inference.transfer_info import PackedUpdateInfo
from pipelinerl.weights.packing import pack
from pipelinerl.weights.seal import mark_of

INFO = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2], [3]], "pass_id": 5}
TENSORS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0], dtype=torch.bfloat16)]


class Doubles:
    """Group, stream and model in one."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.calls: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self._buffers = iter(buffers)

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.calls.append("broadcast")
        buffer.copy_(next(self._buffers))

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("load")
        self.loaded.update({name: tensor.clone() for name, tensor in tensors})


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[torch.Tensor]], Doubles]:
    """Receives an update of two buffers from the given ones; returns the doubles, which hold the error too."""

    def run(buffers: list[torch.Tensor]) -> Doubles:
        doubles = Doubles(buffers)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: doubles)
        engine: Any = object.__new__(NCCLWeightTransferEngine)
        engine.model = engine._group = doubles
        engine.device = torch.device("cpu")
        engine._chunk_bytes = 0
        try:
            engine.receive_weights(engine.parse_update_info(INFO))
        except RuntimeError as error:
            doubles.calls.append(str(error))
        return doubles

    return run


def sealed() -> list[torch.Tensor]:
    return [pack([TENSORS[0]], mark_of(5, 0, 8)), pack([TENSORS[1]], mark_of(5, 1, 6))]


def test_a_buffer_is_loaded_after_its_broadcast_and_kept_until_it_was_copied(receive) -> None:
    doubles = receive(sealed())
    assert doubles.calls == ["broadcast", "load", "synchronize"] * 2
    assert torch.equal(doubles.loaded["a"], TENSORS[0])
    assert torch.equal(doubles.loaded["b"], TENSORS[1])


def test_zeros_are_refused_and_the_other_broadcasts_are_still_taken(receive) -> None:
    first, second = sealed()
    doubles = receive([torch.zeros_like(first), second])
    *calls, error = doubles.calls
    assert calls == ["broadcast"] * 2
    # Buffer 0 of pass 5 with 8 bytes has the mark 2 * 13 + 1.
    assert error.startswith("nccl: buffer 1 of 2 arrived damaged: checksum 0, expected -27 (all zeros);")
    assert doubles.loaded == {}


def test_an_update_without_a_pass_is_refused(receive) -> None:
    engine: Any = object.__new__(NCCLWeightTransferEngine)
    with pytest.raises(ValueError, match="pass_id"):
        engine.parse_update_info({name: value for name, value in INFO.items() if name != "pass_id"})
    assert engine.parse_update_info(INFO) == PackedUpdateInfo(**INFO)
