"""Loading in place on a GPU: the copies of vLLM's loaders as CUDA graphs, with values."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

_SHAPES = {"q": (5, 8), "k": (3, 8), "norm": (8,), "head": (11, 8)}


class _Model(torch.nn.Module):
    """Stacks `q` and `k` in one parameter and pads `head`, as vLLM's models do."""

    def __init__(self, waits_for_the_device: bool = False) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda"))
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16, device="cuda"))
        self.head = torch.nn.Parameter(torch.ones(16, 8, dtype=torch.bfloat16, device="cuda"))
        self.loaded = 0
        self._waits = waits_for_the_device

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded += 1
        for name, tensor in weights:
            if self._waits:
                tensor.sum().item()
            if name == "q":
                self.qk.data[:5].copy_(tensor)
            elif name == "k":
                self.qk.data[5:].copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor * 2)
            else:
                self.head.data[:11].copy_(tensor)
                self.head.data[11:].fill_(0)


@pytest.mark.parametrize(("waits_for_the_device", "expected_calls"), [(False, 4), (True, 9)])
def test_every_update_in_place_brings_its_own_values(waits_for_the_device: bool, expected_calls: int) -> None:
    from pipelinerl.inference.transfer import InPlaceLoading

    model = _Model(waits_for_the_device)
    loading = InPlaceLoading(model, _SHAPES, tied=False)
    for update in range(4):
        torch.manual_seed(update)
        # fp32 for one tensor: the loaders cast. An odd number of elements: views of a buffer may not be aligned.
        sent = {
            name: torch.randn(shape, device="cuda", dtype=torch.float32 if name == "k" else torch.bfloat16)
            for name, shape in _SHAPES.items()
        }
        loading.begin(is_noted=True)
        for names in (("q", "k"), ("norm", "head")):
            loading.load([(name, sent[name].clone()) for name in names])
        loading.finish()
        assert torch.equal(model.qk, torch.cat([sent["q"], sent["k"].bfloat16()]))
        assert torch.equal(model.norm, sent["norm"] * 2)
        assert torch.equal(model.head, torch.nn.functional.pad(sent["head"], (0, 0, 0, 5)))
    # A failed capture has to leave the random generator as it was.
    assert torch.rand(3, device="cuda").isfinite().all()
    # Twice for each of two buffers, then replays alone. If the first capture fails, it was one more.
    assert model.loaded == expected_calls
