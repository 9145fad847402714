"""`finetune.dtype=tf32` on a GPU: TF32 where it is allowed, exact where it is not, and no warning from torch."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch

from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model_check import tf32_difference
from pipelinerl.finetune.policy import allowed_products, fp32_products, token_logprobs
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CONFTEST = Path(__file__).parents[1] / "unit" / "finetune" / "conftest.py"


@pytest.fixture(scope="module")
def kit():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("tf32_kit", CONFTEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tf32_kit"] = module
    spec.loader.exec_module(module)
    return module.Kit()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def test_products_are_in_tf32_only_where_they_may_be(device: torch.device) -> None:
    left = torch.randn(256, 256, device=device, generator=torch.Generator(device).manual_seed(1))
    expected = left.double() @ left.double()
    before = allowed_products()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fp32_products("tf32"):
            rounded = float((left @ left - expected).abs().mean())
            with fp32_products("ieee"):
                exact = float((left @ left - expected).abs().mean())
    assert rounded > 20 * exact
    assert allowed_products() == before != "tf32"


def test_the_fp32_head_is_the_same_where_tf32_is_allowed(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(2)
    hidden = torch.randn(64, 128, device=device, generator=generator, requires_grad=True)
    weight = torch.randn(512, 128, device=device, generator=generator, requires_grad=True)
    targets = torch.arange(64, device=device)

    def run() -> tuple[torch.Tensor, ...]:
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_tokens=20)
        return (logprobs.detach(), *torch.autograd.grad(logprobs.sum(), (hidden, weight)))

    exact = run()
    with fp32_products("tf32"):
        allowed = run()
    for one, other in zip(exact, allowed, strict=True):
        assert torch.equal(one, other)


def test_a_step_in_tf32_gives_almost_the_exact_gradient(kit, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    flat = {}
    for tf32 in (False, True):
        policy = kit.policy(tf32=tf32).to(device)
        config, ranks = kit.config(), Ranks(device=device)
        runner = StepRunner(PlainBackend(policy, config, ranks), config, ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runner.accumulate(kit.batch(kit.samples(32, 1)))
        flat[tf32] = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert not torch.equal(flat[True], flat[False])
    assert float((flat[True] - flat[False]).norm() / flat[False].norm()) < 0.02


def test_positions_stay_exact(kit, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    policy = kit.policy(tf32=True).to(device)
    policy.language_model.config.max_position_embeddings = 8192
    # So few rows may run without TF32, then nothing differs; what must not happen is a position that was rounded.
    assert tf32_difference(policy) < 0.02
