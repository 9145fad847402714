"""The one-kernel attention on a GPU: its kernel and the plain one of the unit tests, forward and backward."""

from __future__ import annotations

import pytest
import torch
from fakes.varlen_kernel import plain_varlen_attn

from pipelinerl.finetune import attention
from pipelinerl.finetune.attention import SharedPrefixes, can_use_varlen, varlen_attention, varlen_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("prefix", [0, 1, 60, 129])
def test_the_kernel_computes_what_the_plain_one_does(
    monkeypatch: pytest.MonkeyPatch, key_heads: int, window: int | None, prefix: int
) -> None:
    """`prefix`: tokens that the first and the last sample have in common."""
    device = torch.device("cuda", 0)
    if not can_use_varlen(torch.bfloat16, device):
        pytest.skip("this PyTorch has no torch.nn.attention.varlen with a window and a scale")
    lengths = [130, 1, 77, 300]
    torch.manual_seed(0)
    row = torch.arange(sum(lengths))
    row[208 : 208 + prefix] = row[:prefix]
    kept = torch.tensor([place for place in range(len(row)) if not 208 <= place < 208 + prefix])
    shared = SharedPrefixes(kept, torch.searchsorted(kept, row)) if prefix else None
    layout = varlen_layout(lengths, shared).to(device)
    results = []
    inputs = [
        torch.randn(1, heads, len(kept), 64, device=device, dtype=torch.bfloat16) for heads in (6, key_heads, key_heads)
    ]
    weight = torch.randn(1, len(kept), 6, 64, device=device)
    for kernel in (attention._kernel(), plain_varlen_attn):
        monkeypatch.setattr(attention, "_kernel", lambda kernel=kernel: kernel)
        leaves = [states.clone().requires_grad_() for states in inputs]
        output = varlen_attention(*leaves, layout, 0.1, window)  # type: ignore[misc]
        (output.float() * weight).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*results, strict=True):
        assert ours is not None and plain is not None
        scale = float(plain.abs().max())
        torch.testing.assert_close(ours.float(), plain.float(), rtol=0, atol=0.02 * scale)
