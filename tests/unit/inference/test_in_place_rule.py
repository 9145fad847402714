"""Which models are loaded in place: plain ones on a GPU, unless somebody turned it off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from pipelinerl.inference import reload
from pipelinerl.inference.in_place import IN_PLACE_VARIABLE, can_load_in_place
from pipelinerl.inference.reload import CheckedReload, IncompleteUpdateError

# What it imports looks at the device: read it before a test says that this is a GPU.
can_load_in_place(torch.nn.Linear(1, 1), {})


class Quantized(UnquantizedLinearMethod):
    """A method that rearranges its weights."""


def model(method: object) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method
    return torch.nn.Sequential(layer)


@pytest.mark.parametrize(
    ("on_gpu", "environ", "method", "expected"),
    [
        (True, {}, UnquantizedLinearMethod(), True),
        (True, {IN_PLACE_VARIABLE: "1"}, UnquantizedLinearMethod(), True),
        (True, {IN_PLACE_VARIABLE: "0"}, UnquantizedLinearMethod(), False),
        (True, {}, Quantized(), False),
        (False, {}, UnquantizedLinearMethod(), False),
    ],
)
def test_plain_models_on_gpus_are_loaded_in_place(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, environ: dict[str, str], method: object, expected: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: on_gpu)
    assert can_load_in_place(model(method), environ) is expected


def test_a_layer_that_prepares_its_weights_after_loading_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    network = model(UnquantizedLinearMethod())
    network[0].process_weights_after_loading = lambda dtype: None
    assert not can_load_in_place(network, {})


def test_layers_that_are_wrapped_for_adapters_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    wrapper = torch.nn.Module()
    wrapper.base_layer = model(UnquantizedLinearMethod())[0]
    assert not can_load_in_place(torch.nn.Sequential(wrapper), {})


def attention(impl: object) -> torch.nn.Module:
    """An attention layer with nothing but its kernel."""
    layer = object.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = impl
    return torch.nn.Sequential(layer)


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
    ("kernel", "expected"),
    [
        (lambda: Kernel(), True),
        (lambda: KernelWithSinks(None), True),
        (lambda: KernelWithSinks(torch.zeros(2)), False),
        (lambda: UnknownKernel(), False),
        (lambda: Both(Kernel(), KernelWithSinks(None)), True),
        (lambda: Both(Kernel(), KernelWithSinks(torch.zeros(2))), False),
    ],
)
def test_attention_that_keeps_a_copy_of_its_sinks_is_not_loaded_in_place(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[[], Kernel], expected: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert can_load_in_place(attention(kernel()), {}) is expected


class Engine(CheckedReload):
    """The life cycle of an update alone; layer by layer is only noted."""

    may_load_in_place = True

    def __init__(self, checkpoint: Path) -> None:
        self.model = model(UnquantizedLinearMethod())
        text = SimpleNamespace(tie_word_embeddings=False)
        hf_config = SimpleNamespace(get_text_config=lambda: text)
        self.model_config = SimpleNamespace(model=str(checkpoint), revision=None, hf_config=hf_config)


@pytest.fixture
def layerwise_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(reload.layerwise, "initialize_layerwise_reload", lambda model: calls.append("initialize"))
    monkeypatch.setattr(reload.layerwise, "finalize_layerwise_reload", lambda *_: calls.append("finalize"))
    return calls


def test_a_checkpoint_without_safetensors_is_loaded_layer_by_layer(tmp_path: Path, layerwise_calls: list[str]) -> None:
    """Only there the layers themselves can tell what is missing."""
    (tmp_path / "pytorch_model.bin").touch()
    engine = Engine(tmp_path)
    engine.start_weight_update()
    engine.expect(["0.weight"], [[2, 2]])
    engine.all_loaded()
    engine.finish_weight_update()
    assert layerwise_calls == ["initialize", "finalize"]


def test_in_place_an_update_is_whole_when_all_of_it_was_received(tmp_path: Path, layerwise_calls: list[str]) -> None:
    save_file({"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    engine = Engine(tmp_path)
    for received in (False, True):
        engine.start_weight_update()
        with pytest.raises(IncompleteUpdateError, match=r"left out: 0\.bias"):
            engine.expect(["0.weight"], [[2, 2]])
        engine.expect(["0.weight", "0.bias"], [[2, 2], [2]])
        if received:
            engine.all_loaded()
            engine.finish_weight_update()
        else:  # cut short: what was announced is not what was loaded
            with pytest.raises(IncompleteUpdateError, match="not all tensors were received"):
                engine.finish_weight_update()
    assert layerwise_calls == []
