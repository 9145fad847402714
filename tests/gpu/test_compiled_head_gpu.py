"""The compiled output head on a GPU: no further from fp64 than PyTorch's own operations are."""

from __future__ import annotations

import pytest
import torch
from fakes.head_case import HeadCase
from torch._dynamo.utils import counters

from pipelinerl.finetune import policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_exact_as_pytorch(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    with_bias: bool,
    with_entropy: bool,
) -> None:
    case = HeadCase(100, 64, 50_001, with_bias, temperature=0.8, device="cuda", rounded_to=dtype)
    exact = case.run(torch.float64, with_entropy, plain=True)

    def errors() -> list[float]:
        found = case.run(dtype, with_entropy, chunk_tokens=40)
        return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, exact, strict=True)]

    compiled = errors()
    assert not [record for record in caplog.records if record.name == policy.__name__]
    for name in ("_statistics", "_slope"):
        monkeypatch.setattr(policy, name, getattr(policy, name).__wrapped__)
    for ours, theirs in zip(compiled, errors(), strict=True):
        assert ours < 1.05 * theirs + 3e-7


def test_all_numbers_of_rows_and_temperatures_share_one_graph() -> None:
    HeadCase(100, 8, 1001, device="cuda").run(torch.bfloat16, False, chunk_tokens=40)
    before = counters["stats"]["unique_graphs"]
    for rows, temperature in ((7, 1.0), (90, 0.8), (300, 0.6)):
        HeadCase(rows, 8, 1001, temperature=temperature, device="cuda").run(torch.bfloat16, False, chunk_tokens=40)
    # A temperature other than that of the first graph makes it an argument of another one.
    assert counters["stats"]["unique_graphs"] - before <= 2
