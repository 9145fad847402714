"""The compiled output head on a GPU: no further from fp64 than PyTorch's own operations are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fakes.finetune_kit import Kit
from fakes.head_case import EXTREME, HeadCase, extreme
from torch._dynamo.utils import counters

from pipelinerl.finetune import policy
from pipelinerl.finetune.model_check import token_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def _own_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    for name in ("_statistics", "_slope"):
        monkeypatch.setattr(policy, name, policy.compiled_on_gpus(getattr(policy, name).__wrapped__))
    yield
    torch._dynamo.reset()


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
    assert counters["stats"]["unique_graphs"] == 2
    assert not [record for record in caplog.records if record.name == policy.__name__]
    for name in ("_statistics", "_slope"):
        monkeypatch.setattr(policy, name, getattr(policy, name).__wrapped__)
    for ours, theirs in zip(compiled, errors(), strict=True):
        assert ours < 1.05 * theirs + 3e-7


def test_all_numbers_of_rows_and_temperatures_share_one_graph() -> None:
    for rows, temperature in ((100, 1.0), (7, 1.0), (90, 0.8), (300, 0.6)):
        HeadCase(rows, 8, 1001, temperature=temperature, device="cuda").run(torch.bfloat16, False, chunk_tokens=40)
    # Each of the two functions has one for the first temperature, and one with a temperature as an argument.
    assert 2 <= counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize(("logits", "target", "logprob", "entropy", "slope"), EXTREME)
def test_certain_and_impossible_tokens(
    logits: list[float], target: int, logprob: float, entropy: float, slope: list[float]
) -> None:
    found = extreme(logits, target, "cuda")
    assert counters["stats"]["unique_graphs"] == 2
    assert [*found] == [pytest.approx(logprob), pytest.approx(entropy), pytest.approx(slope)]


def test_passes_without_gradients_compile_the_head_too() -> None:
    kit_policy = Kit().policy("llama").to("cuda")
    kit_policy.has_compiled_layers = True  # of which nothing is compiled here
    with torch.no_grad():
        kit_policy(*kit_policy.placed(token_batch([[5, 6, 7]], torch.device("cpu")), torch.device("cuda")))
    assert counters["stats"]["unique_graphs"] == 1
