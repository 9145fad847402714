"""Compiled decoder layers: gradients of the layers as they were, one graph for all micro-batches, and a way back."""

from __future__ import annotations

import logging

import pytest
import torch
from fakes.finetune_kit import Kit
from fakes.varlen_kernel import traceable_varlen_attn
from torch._dynamo.utils import counters

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.finetune import attention, compiled_layers
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.compiled_layers import can_compile, compile_layers
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.model_check import branching_tokens, token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner


@pytest.fixture(autouse=True)
def _own_graphs(monkeypatch):
    monkeypatch.setattr(attention, "_kernel", lambda: traceable_varlen_attn)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def varlen_policy(kit: Kit, family: str = "qwen2", **options) -> PolicyModel:
    return kit.policy(family, attention=attention.VARLEN_ATTENTION, shares_prefixes=True, **options)


def gradients(kit: Kit, policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Of a step whose micro-batches have many samples, one, and none at all, and of samples with common prefixes."""
    config, ranks = kit.config(), Ranks()
    runner = StepRunner(PlainBackend(policy, config, ranks), config, ranks)
    samples = kit.samples(24, seed=1, masked_every=9)
    batch = kit.batch(samples, plan=[[[*range(9)], [9], [*range(10, 24)], []]])
    runner.accumulate(batch)
    for lengths in ((24, 16, 8), (9, 31, 20, 4)):
        placed = policy.placed(token_batch(branching_tokens(policy, lengths), torch.device("cpu")), torch.device("cpu"))
        assert placed[1].shared is not None
        policy(*placed).logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 4
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5 * max(1, float(tensor.abs().max())), msg=name)


@pytest.mark.parametrize(
    ("family", "backend", "kind"),
    [
        ("qwen2", "eager", "plain"),
        pytest.param("qwen2", "inductor", "plain", marks=pytest.mark.slow),
        pytest.param("llama", "aot_eager", "checkpointing", marks=pytest.mark.slow),
        pytest.param("qwen2", "aot_eager", "adapters", marks=pytest.mark.slow),
        pytest.param("qwen2", "aot_eager", "checkpointed adapters", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_layers_as_they_were(kit, family, backend, kind):
    policy = varlen_policy(kit, family)
    if "adapters" in kind:
        torch.manual_seed(3)
        add_adapters(policy, LoraConfig(enabled=True, r=4, alpha=10.0), "base")
    if "checkpoint" in kind:
        policy.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = gradients(kit, policy)
    before = counters["stats"]["unique_graphs"]
    compile_layers(policy, pack_tokens=128, backend=backend)
    assert policy.has_compiled_layers
    graphs = counters["stats"]["unique_graphs"] - before
    same(gradients(kit, policy), expected)
    with torch.no_grad():
        policy(*policy.placed(token_batch([[5, 6, 7]], torch.device("cpu")), torch.device("cpu")))
    # What a first layer gets from a frozen embedding has no gradient.
    assert counters["stats"]["unique_graphs"] - before == graphs == 2 * (1 + (kind == "adapters"))


def test_a_compiler_that_fails_is_told_once_and_done_without(kit, caplog):
    def broken(graph, inputs):
        raise RuntimeError("no C compiler")

    policy = varlen_policy(kit)
    expected = gradients(kit, policy)
    with caplog.at_level(logging.WARNING, logger="pipelinerl"):
        compile_layers(policy, pack_tokens=128, backend=broken)
    assert not policy.has_compiled_layers and len(caplog.records) == 1
    same(gradients(kit, policy), expected)


def test_what_computes_something_else_is_not_used(kit, caplog):
    def wrong(graph, inputs):
        return lambda *values: tuple(1.5 * output for output in graph(*values))

    policy = varlen_policy(kit)
    expected = gradients(kit, policy)
    with caplog.at_level(logging.WARNING, logger="pipelinerl"):
        compile_layers(policy, pack_tokens=128, backend=wrong)
    assert not policy.has_compiled_layers and len(caplog.records) == 1
    same(gradients(kit, policy), expected)


@pytest.mark.parametrize("wrong_one", [0, 1])
def test_each_graph_is_compared(kit, caplog, wrong_one):
    """That of samples apart, and that of shared prefixes."""
    graphs = []

    def half_wrong(graph, inputs):
        graphs.append(graph)
        factor = 1.5 if len(graphs) - 1 == wrong_one else 1.0
        return lambda *values: tuple(factor * output for output in graph(*values))

    policy = varlen_policy(kit)
    compile_layers(policy, pack_tokens=128, backend=half_wrong)
    assert len(graphs) == 2 and policy.has_compiled_layers is False


def test_what_rounds_no_worse_than_the_layers_as_they_were_is_used(kit, monkeypatch):
    monkeypatch.setattr(compiled_layers, "_LOGPROB_TOLERANCE", 0.0)
    monkeypatch.setattr(compiled_layers, "_GRADIENT_TOLERANCE", 0.0)
    policy = varlen_policy(kit, compute_dtype=torch.bfloat16)
    compile_layers(policy, pack_tokens=128, backend="eager")
    assert policy.has_compiled_layers


@pytest.mark.parametrize(("factor", "is_used"), [(1.001, True), (1.5, False)])
def test_what_is_off_by_more_than_the_tolerance_is_not_used(kit, caplog, factor, is_used):
    policy = varlen_policy(kit)
    with caplog.at_level(logging.INFO, logger="pipelinerl"):
        compile_layers(policy, 128, lambda graph, inputs: lambda *values: tuple(factor * o for o in graph(*values)))
    assert policy.has_compiled_layers is is_used
    named = [name for name, _ in policy.named_parameters() if name in caplog.text]
    assert bool(named) is not is_used


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_layers_with_adapters_on_frozen_bf16_are_compiled(kit, is_checkpointed):
    policy = varlen_policy(kit, compute_dtype=torch.bfloat16)
    add_adapters(policy, LoraConfig(enabled=True, r=4), "base")
    before = {name: (p.dtype, p.data_ptr()) for name, p in policy.named_parameters()}
    assert torch.bfloat16 in {dtype for dtype, _ in before.values()}
    if is_checkpointed:
        policy.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    compile_layers(policy, pack_tokens=128, backend="eager")
    assert policy.has_compiled_layers
    assert {name: (p.dtype, p.data_ptr()) for name, p in policy.named_parameters()} == before
    assert policy.language_model.is_gradient_checkpointing is is_checkpointed


def test_a_trial_without_a_gradient_is_a_fault(kit):
    policy = varlen_policy(kit)
    compile_layers(policy, pack_tokens=4, backend="eager")
    assert policy.has_compiled_layers is False


def test_it_can_be_turned_off(kit):
    config = RunConfig(output_dir="unused", model_path="unused")
    with torch._dynamo.config.patch(disable=True):
        assert not can_compile(varlen_policy(kit), config)


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({}, True),
        ({"finetune": {"seq_packing": False}}, False),
        ({"backend": {"type": "fsdp"}}, False),
        ({"backend": {"type": "deepspeed"}}, False),
    ],
)
def test_it_is_for_whole_models_and_packed_samples(kit, changes, is_right):
    config = RunConfig(output_dir="unused", model_path="unused", **changes)
    assert can_compile(varlen_policy(kit), config) is is_right
    assert not can_compile(kit.policy(), config)
