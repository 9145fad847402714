"""A tensor of any kind that is missing, zeroed or swapped is found at once; one that stays old within ten steps.

A few vectors of some families have less effect than the probe tolerates (a decay's bias), and any vector that moved by
little: there names, the checksums of buffers, and what the server's loaders read are what finds faults
(`integration/test_loader_faults`).
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from fakes.families import random_model

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.probe import PROBE_TOLERANCE
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.weights.buffers import coverage_problems, saved_buffers

CPU = torch.device("cpu")
TOLERANCE = PROBE_TOLERANCE["float32"]
IDS = [[(7 * k * k + 3 * n) % 61 + 3 for k in range(40)] for n in range(3)]
#: Norms, heads, routers, experts, shared ones, a bias of the router; sinks; convolutions, decays and steps.
FAMILIES = ("glm4_moe", "gpt_oss", "qwen3_next")


def logprobs(policy: PolicyModel) -> torch.Tensor:
    rows = [token_batch([ids], CPU) for ids in IDS]
    return torch.cat([policy(*policy.placed(row, CPU), 1.0).logprobs[0, :-1] for row in rows])


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """One of every kind: of names that differ in numbers alone, the last."""
    named = dict((*model.named_parameters(), *saved_buffers(model)))
    return {name: named[name] for name in {re.sub(r"\d+", "#", name): name for name in named}.values()}


@torch.no_grad()
def gap(policy: PolicyModel, tensor: torch.Tensor, wrong: torch.Tensor) -> float:
    """What the probe would measure if the server had `wrong` for one tensor."""
    expected, right = logprobs(policy), tensor.clone()
    tensor.copy_(wrong)
    found = float((logprobs(policy) - expected).abs().mean())
    tensor.copy_(right)
    return found


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_wrong_tensor_is_found_at_once(family: str) -> None:
    # In a wider model a single vector says less.
    heads = dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8
    )
    model = random_model(family, vocab_size=64, hidden_size=32, **heads)
    policy = PolicyModel(model)
    missed = []
    for name, tensor in tensors_of(model).items():
        generator = torch.Generator().manual_seed(1)
        swapped = torch.randn(tensor.shape, generator=generator).mul(tensor.std()).add(tensor.mean())
        missed += [
            (name, fault, value)
            for fault, wrong in (("zeroed", torch.zeros_like(tensor)), ("swapped", swapped))
            if not (value := gap(policy, tensor, wrong)) > TOLERANCE
        ]
    assert missed == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_tensor_is_named(family: str) -> None:
    source = PlainBackend(PolicyModel(random_model(family)), FinetuneConfig(), Ranks()).weight_source(torch.float32)
    shapes = {meta.name: meta.shape for meta in source.metadata()}
    for name in shapes:
        sent = {other: shape for other, shape in shapes.items() if other != name}
        [problem] = coverage_problems(shapes, sent, tied=False)
        assert problem.startswith("1 ") and "left out" in problem
        assert shapes.keys() & set(re.findall(r"[\w.]+", problem)) == {name}


def test_a_stale_tensor_is_found_within_ten_steps() -> None:
    policy = PolicyModel(random_model("glm4_moe"))
    backend = PlainBackend(policy, FinetuneConfig(learning_rate=1e-2), Ranks())
    before = copy.deepcopy({name: p.detach() for name, p in tensors_of(policy.language_model).items()})
    for _ in range(10):
        for ids in IDS:
            outputs = backend.forward(*policy.placed(token_batch([ids], CPU), CPU))
            backend.backward(-outputs.logprobs.mean(), is_last=True)
        backend.step()
    trained = {name: p for name, p in tensors_of(policy.language_model).items() if isinstance(p, torch.nn.Parameter)}
    missed = [(name, value) for name, p in trained.items() if not (value := gap(policy, p, before[name])) > TOLERANCE]
    assert missed == []
