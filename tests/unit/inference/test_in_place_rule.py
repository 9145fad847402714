"""Which models are loaded in place: plain ones on a GPU, unless somebody turned it off."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm import platforms
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from pipelinerl.inference.in_place import IN_PLACE_VARIABLE, can_load_in_place


class Platform:
    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def is_cuda(self) -> bool:
        return self.on_gpu


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
    monkeypatch.setattr(platforms, "current_platform", Platform(on_gpu))
    assert can_load_in_place(model(method), environ) is expected


def test_a_layer_that_prepares_its_weights_after_loading_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "current_platform", Platform(True))
    network = model(UnquantizedLinearMethod())
    network[0].process_weights_after_loading = lambda dtype: None
    assert not can_load_in_place(network, {})
