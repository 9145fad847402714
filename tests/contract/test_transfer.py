"""The transfer engine of a worker, and which models are loaded in place: plain ones on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from pipelinerl.inference import transfer
from pipelinerl.inference.engine import narrow_tensors
from pipelinerl.inference.transfer import (
    IN_PLACE_VARIABLE,
    IncompleteUpdateError,
    PackedTransferEngine,
    UpdateInfo,
    can_load_in_place,
)
from pipelinerl.weights.buffers import ModuleSource, packed_buffers, update_info_of


class Quantized(UnquantizedLinearMethod):
    """A method that rearranges its weights."""


def linear(method: object = None, **attributes: object) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = UnquantizedLinearMethod() if method is None else method
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def attention(impl: object) -> torch.nn.Module:
    """An attention layer with nothing but its kernel."""
    layer = object.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = impl
    return layer


class Kernel(AttentionImplBase):
    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.empty(0)


class KernelWithSinks(Kernel):
    """Like those that keep the sinks of a layer in fp32: the copy is made after loading."""

    def __init__(self, sinks: torch.Tensor | None) -> None:
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Would copy."""


class UnknownKernel(Kernel):
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Who knows what it keeps."""


class Both(Kernel):
    """Two kernels, of which each runs at its time."""

    def __init__(self, *variants: Kernel) -> None:
        self.variants = variants

    def get_impl_variants(self) -> tuple[Kernel, ...]:
        return self.variants


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (lambda: linear(), True),
        (lambda: linear(Quantized()), False),
        (lambda: linear(process_weights_after_loading=lambda dtype: None), False),
        (lambda: linear(base_layer=linear()), False),  # as it is wrapped for an adapter
        (lambda: attention(Kernel()), True),
        (lambda: attention(KernelWithSinks(None)), True),
        (lambda: attention(KernelWithSinks(torch.zeros(2))), False),
        (lambda: attention(UnknownKernel()), False),
        (lambda: attention(Both(Kernel(), KernelWithSinks(None))), True),
        (lambda: attention(Both(Kernel(), KernelWithSinks(torch.zeros(2)))), False),
    ],
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_plain_models_on_gpus_are_loaded_in_place(
    monkeypatch: pytest.MonkeyPatch, layer: Callable[[], torch.nn.Module], expected: bool, on_gpu: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: on_gpu)
    assert can_load_in_place(torch.nn.Sequential(layer())) is (expected and on_gpu)


class Doubles(torch.nn.Module):
    """A model that notes what it is given, and the wire that brings it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.loaded: dict[str, torch.Tensor] = {}
        self.buffers: list[torch.Tensor] = []
        self.unknown = ""

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update({name: tensor.clone() for name, tensor in tensors if name != self.unknown})

    def receive(self, num_bytes: int) -> torch.Tensor:
        return self.buffers.pop(0)


def engine_of(checkpoint: Path) -> Any:
    engine: Any = object.__new__(PackedTransferEngine)
    engine.model = engine._receiver = Doubles()
    text = SimpleNamespace(tie_word_embeddings=False)
    hf_config = SimpleNamespace(get_text_config=lambda: text)
    engine.model_config = SimpleNamespace(model=str(checkpoint), revision=None, hf_config=hf_config)
    engine.parallel_config = SimpleNamespace(pipeline_parallel_size=1, enable_expert_parallel=False)
    engine.device = torch.device("cpu")
    return engine


@pytest.fixture
def layerwise_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(transfer.layerwise, "initialize_layerwise_reload", lambda model: calls.append("initialize"))
    monkeypatch.setattr(transfer.layerwise, "finalize_layerwise_reload", lambda *_: calls.append("finalize"))
    return calls


def send(engine: Any, sent: torch.nn.Module, damaged: bool = False) -> None:
    """One update, up to the end of the transfer."""
    source = ModuleSource(sent)
    metas = source.metadata()
    engine.model.buffers = list(packed_buffers(source, metas, 0, 5))
    if damaged:
        engine.model.buffers[-1].zero_()
    engine.start_weight_update()
    engine.update_weights(update_info_of(metas, 0, 5))


@pytest.mark.parametrize("why", ["no safetensors", "turned off"])
def test_others_are_loaded_layer_by_layer(
    tmp_path: Path, layerwise_calls: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = torch.nn.Linear(2, 2)
    if why == "turned off":
        save_file(dict(sent.state_dict()), tmp_path / "model.safetensors")
        monkeypatch.setenv(IN_PLACE_VARIABLE, "0")
    engine = engine_of(tmp_path)
    send(engine, sent)
    engine.finish_weight_update()
    assert layerwise_calls == ["initialize", "finalize"]
    assert torch.equal(engine.model.loaded["weight"], sent.weight)


def test_w1_in_place_an_update_has_to_cover_the_checkpoint(tmp_path: Path, layerwise_calls: list[str]) -> None:
    """The layers cannot tell afterwards; and what was announced but not received is no update either."""
    sent = torch.nn.Linear(2, 2)
    save_file(dict(sent.state_dict()), tmp_path / "model.safetensors")
    engine = engine_of(tmp_path)
    with pytest.raises(IncompleteUpdateError, match="bias"):
        send(engine, torch.nn.Linear(2, 2, bias=False))
    assert engine.model.loaded == {}
    with pytest.raises(RuntimeError, match="buffer 2 of 2 arrived damaged"):
        send(engine, sent, damaged=True)
    with pytest.raises(IncompleteUpdateError, match="not all tensors were received"):
        engine.finish_weight_update()
    send(engine, sent)
    engine.finish_weight_update()
    assert torch.equal(engine.model.loaded["bias"], sent.bias)
    assert layerwise_calls == []


@pytest.mark.parametrize("way", ["in place", "layer by layer"])
def test_w1_a_tensor_that_the_loaders_skip_is_named(tmp_path: Path, layerwise_calls: list[str], way: str) -> None:
    """It stays as it was in the server, however small the difference is."""
    sent = torch.nn.Linear(2, 2)
    if way == "in place":
        save_file(dict(sent.state_dict()), tmp_path / "model.safetensors")
    engine = engine_of(tmp_path)
    for _ in range(transfer.NOTED_EVERY):
        send(engine, sent)
        engine.finish_weight_update()
    for skipped in ("bias", "weight"):
        engine.model.unknown = skipped
        send(engine, sent)
        with pytest.raises(IncompleteUpdateError, match=f"ignored 1 of the tensors: {skipped}"):
            engine.finish_weight_update()


@pytest.mark.parametrize("part", [{"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}])
def test_a_worker_with_a_part_of_the_tensors_may_skip_some(
    tmp_path: Path, layerwise_calls: list[str], part: dict[str, Any]
) -> None:
    engine = engine_of(tmp_path)
    vars(engine.parallel_config).update(part)
    engine.model.unknown = "bias"
    send(engine, torch.nn.Linear(2, 2))
    engine.finish_weight_update()


def test_a_tensor_counts_as_read_once_its_values_are_used() -> None:
    buffer = torch.arange(12.0)
    tensors = [(name, buffer[3 * place : 3 * place + 3].view(3, 1)) for place, name in enumerate("abcd")]
    parameter = torch.empty(6)
    with transfer.ReadRecord([*tensors, ("empty", buffer[:0])]) as record:
        parameter[:3].copy_(tensors[0][1].view(3))
        parameter[3:].data.copy_(torch.cat([-torch.exp(tensors[1][1].t()), torch.ones(1, 0)], 1)[0])
        tensors[2][1].t().unsqueeze(0).narrow(1, 0, 1).unbind(0)
        torch.empty(1, device="meta").copy_(tensors[3][1][1:2, 0])
    assert record.unread == {"c"}


def test_updates_go_on_where_the_gpu_has_no_room_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    loaded: list[float] = []
    policy = SimpleNamespace(load_weights=lambda tensors: loaded.extend(float(tensor) for _, tensor in tensors))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loading = transfer.InPlaceLoading(policy, {"w": ()}, tied=False)
    monkeypatch.setattr(torch, "empty", full)
    for update in range(4):
        loading.load([("w", torch.tensor(float(update)))])
    assert loaded == [0.0, 1.0, 2.0, 3.0]


def test_an_update_without_a_pass_is_refused(tmp_path: Path) -> None:
    info = update_info_of([], 0, 5)
    assert engine_of(tmp_path).parse_update_info(info) == UpdateInfo(**info)
    with pytest.raises(ValueError, match="pass_id"):
        engine_of(tmp_path).parse_update_info({name: value for name, value in info.items() if name != "pass_id"})


def test_tensors_in_fewer_bits_than_the_model_are_named() -> None:
    """vLLM has the parameters of Apertus' activation in bf16 whatever its dtype is; loading rounds without a word."""
    with set_current_vllm_config(VllmConfig()):
        wide, activation = torch.nn.Linear(2, 2), XIELU()
    model = torch.nn.ModuleDict({"wide": wide, "activation": activation})
    names = [f"activation.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")]
    assert narrow_tensors(model, torch.float32) == names
    assert narrow_tensors(model, torch.bfloat16) == []
    default_weight_loader(activation.alpha_p, torch.tensor([1.001]))
    assert activation.alpha_p.item() == 1.0
