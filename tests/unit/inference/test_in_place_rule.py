"""Which models are loaded in place: plain ones on a GPU, unless somebody turned it off."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from pipelinerl.inference.in_place import IN_PLACE_VARIABLE, can_load_in_place

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
