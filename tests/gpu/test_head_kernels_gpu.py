"""The head's compiled kernels on a GPU: no further from fp64 than PyTorch's own operations are."""

from __future__ import annotations

import pytest
import torch
from fakes.head_case import HeadCase

from pipelinerl.finetune import policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_are_as_exact_as_pytorch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_bias: bool, with_entropy: bool
) -> None:
    case = HeadCase(100, 64, 50_001, with_bias, temperature=0.8, device="cuda", rounded_to=dtype)
    exact = case.run(torch.float64, with_entropy, plain=True)

    def errors() -> list[float]:
        found = case.run(dtype, with_entropy, chunk_tokens=40)
        return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, exact, strict=True)]

    assert policy.head_kernels(torch.zeros(1, device="cuda")) is not None
    with_kernels = errors()
    monkeypatch.setattr(policy, "head_kernels", lambda logits: None)
    for ours, theirs in zip(with_kernels, errors(), strict=True):
        assert ours < 1.05 * theirs + 3e-7
