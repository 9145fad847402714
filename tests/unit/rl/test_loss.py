"""The default loss, KL, entropy bonus and schedules by hand; micro-batches do not change a loss (M2, M4)."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from rl_samples import collated, make_sample

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.errors import ConfigError
from pipelinerl.rl.loss import POLICY_LOSSES, Coefficients, LossInputs, LossOutputs, coefficients_at, compute_loss
from pipelinerl.rl.microbatch import collate, token_weights
from pipelinerl.rl.user_function import check_user_functions

NONE = Coefficients(kl=0.0, entropy=0.0)


def one_sample(old, advantage=1.0, ref=None):
    return collated([make_sample([1], [2] * len(old), logprobs=old, ref_logprobs=ref, advantage=advantage)])


def run(batch, new, config=None, coefficients=NONE, **more):
    new = torch.tensor([[*new, 0.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = compute_loss(LossInputs.of(batch, new, **more), config or RLConfig(), coefficients)
    (grad,) = torch.autograd.grad(loss, new)
    return loss.item(), metrics, grad[0, :-1].tolist()


def test_reinforce_by_hand():
    # Ratios: e^0.5 kept, e^2 = 7.39 truncated to 5. loss = -(w1 * l1 + w2 * l2) * A / B, gradient = -w * A / B.
    loss, metrics, grad = run(one_sample([-1.0, -3.0], advantage=2.0), [-0.5, -1.0])
    w = [math.exp(0.5), 5.0]
    assert loss == pytest.approx(-2 * (w[0] * -0.5 + w[1] * -1.0))
    assert grad == pytest.approx([-2 * w[0], -2 * w[1]])
    assert metrics["rl/clip_fraction_high"].item() == 0.5


def test_kl_and_entropy_by_hand():
    entropy = torch.tensor([[0.7, 0.0]], dtype=torch.float64)
    batch = one_sample([-1.0], advantage=0.0, ref=[-1.5])
    loss, metrics, grad = run(batch, [-1.0], coefficients=Coefficients(kl=0.1, entropy=0.01), entropy=entropy)
    # r = ref - new = -0.5; k3 = e^r - r - 1; d k3 / d new = 1 - e^r.
    assert loss == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1) - 0.01 * 0.7)
    assert grad == pytest.approx([0.1 * (1 - math.exp(-0.5))])
    assert metrics["rl/entropy"].item() == pytest.approx(0.7)


def test_m4_kl_without_reference_and_entropy_without_entropy_are_refused():
    with pytest.raises(ValueError, match="kl_coef"):
        run(one_sample([-1.0]), [-1.0], coefficients=Coefficients(kl=0.1, entropy=0.0))
    with pytest.raises(ValueError, match="entropy"):
        run(one_sample([-1.0]), [-1.0], coefficients=Coefficients(kl=0.0, entropy=0.1))


def test_schedule():
    config = RLConfig(kl_coef=0.1, final_kl_coef=0.0, entropy_bonus=0.2)
    assert [coefficients_at(config, step, 5).kl for step in (1, 3, 5, 9)] == pytest.approx([0.1, 0.05, 0.0, 0.0])
    assert coefficients_at(config, 3, 5).entropy == 0.2
    assert coefficients_at(config, 1, 1).kl == 0.0


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("aggregation", ["sample", "sample_mean", "token", "group", "constant_length"])
def test_m2_loss_and_gradient_do_not_depend_on_micro_batches(name, aggregation):
    g = torch.Generator().manual_seed(1)
    samples = []
    for k, length in enumerate([3, 1, 5, 2, 4, 7, 1, 6]):
        old = (-torch.rand(length, generator=g) * 3).tolist()
        advantage = torch.randn(1, generator=g).item()
        sample_id = f"0-{k // 3}/r{k}/s0"
        samples.append(make_sample([1, 2], [3] * length, logprobs=old, sample_id=sample_id, advantage=advantage))
    weights = token_weights(samples, aggregation, 8)
    new = {k: -torch.rand(s.num_trained_tokens, generator=g, dtype=torch.float64) for k, s in enumerate(samples)}

    def total(micro_batches, packed):
        leaves = {k: value.clone().requires_grad_() for k, value in new.items()}
        outs = []
        for indices in micro_batches:
            batch = collate(samples, indices, weights=weights, packed=packed, pad_id=0)
            flat = torch.zeros(batch.mask.shape, dtype=torch.float64)
            flat = flat.masked_scatter(batch.mask, torch.cat([leaves[i] for i in batch.indices]))
            inputs = LossInputs.of(batch, flat, trainer_version=3)
            outs.append(compute_loss(inputs, RLConfig(policy_loss=name), NONE))
        loss = sum(loss for loss, _ in outs)
        loss.backward()
        metrics = {key: sum(found[key].item() for _, found in outs) for key in outs[0][1]}
        return loss.item(), torch.cat([leaves[k].grad for k in sorted(leaves)]), metrics

    reference = total([list(range(8))], True)
    for micro_batches, packed in [([[i] for i in range(8)], True), ([[0, 5], [1, 2, 3], [4, 6, 7]], False)]:
        loss, grad, metrics = total(micro_batches, packed)
        assert loss == pytest.approx(reference[0], rel=1e-6)
        torch.testing.assert_close(grad, reference[1])
        assert metrics == pytest.approx(reference[2], rel=1e-5, abs=1e-7)


def test_a_loss_of_the_user_is_a_dotted_path(monkeypatch):
    """Once per sample: -mean log-ratio times the advantage, with a metric of its own."""

    def mean_ratio(inputs, config):
        mean = inputs.sample_mean(inputs.log_ratio())
        metrics = {"rl/their_mean": inputs.token_mean(inputs.to_tokens(mean))}
        return LossOutputs(-inputs.to_tokens(mean) * inputs.advantages, metrics)

    module = types.ModuleType("their_package")
    module.mean_ratio = mean_ratio
    monkeypatch.setitem(sys.modules, "their_package", module)
    config = RLConfig(policy_loss="their_package.mean_ratio")
    loss, metrics, grad = run(one_sample([-1.0, -3.0], advantage=2.0), [-0.5, -1.5], config)
    # Mean log-ratio (0.5 + 1.5) / 2 = 1 on both tokens.
    assert loss == pytest.approx(-4.0) and grad == pytest.approx([-2.0, -2.0])
    assert metrics["rl/their_mean"].item() == pytest.approx(1.0)
    for path in ("their_package.other", "no_such_package.f"):
        with pytest.raises(ConfigError) as error:
            run(one_sample([-1.0]), [-1.0], RLConfig(policy_loss=path))
        assert error.value.key == "finetune.rl.policy_loss"
    check_user_functions(config)
    with pytest.raises(ConfigError) as error:
        check_user_functions(RLConfig(policy_loss="their_package.other"))
    assert error.value.key == "finetune.rl.policy_loss"
