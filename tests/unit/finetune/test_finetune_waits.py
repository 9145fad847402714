"""A micro-batch never makes the host wait for a GPU: the host starts kernels far ahead of it, or small models crawl."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.rl.diagnostics import DiagnosticsSum
from pipelinerl.rl.loss import POLICY_LOSSES, LossInputs, coefficients_at, compute_loss

# What reads a number back, or makes a tensor whose size depends on one.
WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "repeat_interleave.Tensor")


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(word in name for word in WAITING), name
        if "aten.index.Tensor" in name or "index_put" in name:
            assert all(index is None or index.dtype != torch.bool for index in args[1]), f"{name} by a mask"
        return function(*args, **(kwargs or {}))


def test_the_check_sees_what_waits():
    values, mask = torch.ones(3), torch.tensor([True, False, True])
    for waits in (lambda: values[mask], lambda: mask.nonzero(), lambda: float(values[0]), lambda: values.unique()):
        with NoWaiting(), pytest.raises(AssertionError):
            waits()


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
@pytest.mark.parametrize(
    "rl", [{}, {"importance_correction": "mask"}, {"importance_level": "sequence", "importance_correction": "truncate"}]
)
def test_forward_loss_backward_and_diagnostics(kit, monkeypatch, policy_loss, rl):
    monkeypatch.setattr("pipelinerl.rl.diagnostics.MAX_WAITING_TOKENS", 50)
    config = kit.config(rl={"policy_loss": policy_loss, "entropy_bonus": 0.1, **rl})
    policy = kit.policy(attention="pipelinerl_segments", with_entropy=True)
    ranks = Ranks()
    runner = StepRunner(PlainBackend(policy, config, ranks), config, ranks)
    batch = kit.batch(kit.samples(12, masked_every=5))
    coefficients = coefficients_at(config.rl, 1, config.max_train_steps)
    diagnostics = DiagnosticsSum(config.rl.weight_bound)
    micro_batches = runner.micro_batches(batch)
    layouts = [policy.layout_of(micro_batch) for micro_batch in micro_batches]
    with NoWaiting():
        for micro_batch, layout in zip(micro_batches, layouts, strict=True):
            outputs = policy(micro_batch, layout)
            inputs = LossInputs.of(micro_batch, outputs.logprobs, entropy=outputs.entropy)
            compute_loss(inputs, config.rl, coefficients)[0].backward()
            diagnostics.add(inputs)
        total = diagnostics.total()
    assert total.values()["finetune/lag_max_versions"] >= 0
