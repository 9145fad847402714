"""Experts of a mixture are multiplied in bf16 where linear layers are, and trained in fp32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fakes.families import IDS, logprobs, random_model
from transformers import PreTrainedModel
from transformers.integrations import moe

from pipelinerl.finetune.experts import OWN_EXPERTS, use_own_experts
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.served_weights import parameters_to_round

BF16 = torch.bfloat16
#: Experts as most have them; stored transposed and with biases; beside shared ones.
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"]
#: Numbers of their parameters; the tiny models have two layers, the last family experts in the second alone.
NUM_EXPERT_TENSORS = {"qwen3_moe": 4, "mixtral": 4, "gpt_oss": 8, "glm4_moe": 2}


def with_experts(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    model = copy.deepcopy(model)
    if implementation == OWN_EXPERTS:
        use_own_experts(model)
    else:
        model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    return model


def gradients(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    policy = PolicyModel(model, compute_dtype=dtype)
    batch = token_batch([IDS], torch.device("cpu"))
    policy(batch, policy.layout_of(batch), 1.0).logprobs.sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_multiplied_in_the_dtype_of_the_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    multiply = moe._grouped_mm

    def spy(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.update((input.dtype, weight.dtype))
        return multiply(input, weight, **options)

    monkeypatch.setattr(moe, "_grouped_mm", spy)
    model = random_model(family)

    def dtypes(implementation: str, dtype: torch.dtype) -> set[torch.dtype]:
        seen.clear()
        logprobs(PolicyModel(with_experts(model, implementation), compute_dtype=dtype))
        return set(seen)

    assert dtypes(OWN_EXPERTS, BF16) == {BF16}
    assert dtypes(OWN_EXPERTS, torch.float32) == {torch.float32}
    # Why there is an own implementation; it can go when this fails.
    assert torch.float32 in dtypes("grouped_mm", BF16)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp32_they_compute_what_transformers_does(family: str) -> None:
    model = random_model(family)
    own, theirs = with_experts(model, OWN_EXPERTS), with_experts(model, "grouped_mm")
    assert torch.equal(logprobs(PolicyModel(own)), logprobs(PolicyModel(theirs)))
    expected = gradients(theirs, torch.float32)
    for name, gradient in gradients(own, torch.float32).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_in_bf16_is_that_of_linear_layers(family: str) -> None:
    """One expert after the other through `torch.nn.functional.linear`, which autocast knows, is the independent way."""
    model = random_model(family)
    exact = gradients(model, torch.float32)
    eager = gradients(with_experts(model, "eager"), BF16)
    own = gradients(with_experts(model, OWN_EXPERTS), BF16)
    assert set(own) == set(exact)
    for name, gradient in own.items():
        assert gradient.dtype == torch.float32
        assert (gradient - exact[name]).norm() < 0.1 * exact[name].norm(), name

    def error(other: dict[str, torch.Tensor]) -> float:
        return sum(float((other[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    # As far from the exact gradient as the other way is.
    assert 0.5 * error(eager) < error(own) < 2 * error(eager)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_second_tensor_is_kept_for_experts(family: str) -> None:
    model = random_model(family)
    own = with_experts(model, OWN_EXPERTS)
    experts = {name for name, _ in own.named_parameters() if ".experts." in name}
    rounded = {id(parameter) for parameter in parameters_to_round(own, BF16, BF16, is_merged=False)}
    assert len(experts) == NUM_EXPERT_TENSORS[family]
    assert all(id(parameter) not in rounded for name, parameter in own.named_parameters() if name in experts)
    # With fp32 products beside bf16 servers nothing else rounds them.
    for is_merged in (False, True):
        wide = {id(parameter) for parameter in parameters_to_round(own, torch.float32, BF16, is_merged=is_merged)}
        assert all(id(parameter) in wide for name, parameter in own.named_parameters() if name in experts)
    theirs = {id(parameter) for parameter in parameters_to_round(model, BF16, BF16, is_merged=False)}
    assert all(id(parameter) in theirs for name, parameter in model.named_parameters() if name in experts)
