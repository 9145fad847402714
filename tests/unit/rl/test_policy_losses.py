"""PPO, GSPO, CISPO, decoupled PPO, importance correction and value loss, with numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from rl_samples import collated, make_sample, on_trained

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.rl.loss import Coefficients, LossInputs, compute_loss, token_kl

NONE = Coefficients(kl=0.0, entropy=0.0)
LOG2 = math.log(2)


def run(log_ratios, advantages, *, versions=None, trainer_version=0, values=None, token_rewards=None, **rl):
    """Loss and gradient of samples whose log-prob ratios new - old are given, one list per sample (B samples)."""
    samples = []
    for k, ratios in enumerate(log_ratios):
        n = len(ratios)
        spans = [(v, i, i + 1) for i, v in enumerate(versions[k])] if versions else None
        samples.append(make_sample([1], [2] * n, logprobs=[-2.0] * n, sample_id=f"0-{k}/r0/s0", spans=spans))
    per_token = [a if isinstance(a, list) else [a] * len(r) for a, r in zip(advantages, log_ratios, strict=True)]
    batch = collated(samples, advantages=list(chain(*per_token)))
    if token_rewards is not None:
        batch = replace(batch, token_rewards=on_trained(batch, token_rewards))
    flat = torch.tensor([-2.0 + r for ratios in log_ratios for r in ratios], dtype=torch.float64, requires_grad=True)
    new = torch.zeros(batch.mask.shape, dtype=torch.float64).masked_scatter(batch.mask, flat)
    if values is not None:
        values = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, torch.tensor(values)).requires_grad_()
    inputs = LossInputs.of(batch, new, trainer_version=trainer_version, values=values)
    loss, metrics = compute_loss(inputs, RLConfig(**rl), NONE)
    loss.backward()
    metrics = {name: metric.item() for name, metric in metrics.items()}
    return loss.item(), flat.grad.tolist(), metrics, None if values is None else values.grad


def test_ppo_clips_by_sign():
    # Ratios 2, 2, 1/2, 1/2 with A = 1, -1, 1, -1 and range [0.8, 1.3]: only (2, +) and (1/2, -) are clipped.
    loss, grad, metrics, _ = run(
        [[LOG2, LOG2, -LOG2, -LOG2]], [[1.0, -1.0, 1.0, -1.0]], policy_loss="ppo", epsilon_low=0.2, epsilon_high=0.3
    )
    assert loss == pytest.approx(-(1.3 - 2 + 0.5 - 0.8))
    assert grad == pytest.approx([0, 2, -0.5, 0])
    assert metrics["rl/clip_fraction_high"] == 0.25 and metrics["rl/clip_fraction_low"] == 0.25


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    # Ratio 8, A = -1: the loss is 8 without and 3 with dual_clip = 3, and its gradient is cut.
    ratio = math.log(8)
    assert run([[ratio]], [-1.0], policy_loss="ppo")[0] == pytest.approx(8)
    loss, grad, _, _ = run([[ratio]], [-1.0], policy_loss="ppo", dual_clip=3.0)
    assert loss == pytest.approx(3) and grad == [0.0]
    # A > 0 is untouched.
    assert run([[LOG2]], [1.0], policy_loss="ppo", dual_clip=3.0)[0] == pytest.approx(-1.2)


def test_gspo_has_one_ratio_per_sample():
    # Sample 1: mean log-ratio (ln 4 + 0) / 2 = ln 2, s = 2, A = -1: loss per token 2; B = 2.
    # Sample 2: s = 1.1, A = 1, range [0.8, 1.2]: not clipped.
    loss, grad, _, _ = run(
        [[2 * LOG2, 0.0], [math.log(1.1)]], [-1.0, 1.0], policy_loss="gspo", epsilon_low=0.2, epsilon_high=0.2
    )
    assert loss == pytest.approx((2 * 2 - 1.1) / 2)
    # d/d logp_t of sum over both tokens of s = 2 tokens * s / 2 = s, over B.
    assert grad == pytest.approx([1.0, 1.0, -0.55])
    # With A = 1 the whole sample is clipped.
    assert run([[2 * LOG2, 0.0]], [1.0], policy_loss="gspo", epsilon_low=0.2, epsilon_high=0.2)[1] == [0.0, 0.0]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    loss, grad, _, _ = run([[LOG2, -LOG2]], [1.0], policy_loss="cispo", epsilon_low=0.2, epsilon_high=0.5)
    assert grad == pytest.approx([-1.5, -0.8])
    assert loss == pytest.approx(-(1.5 * (-2 + LOG2) + 0.8 * (-2 - LOG2)))


def test_sapo_gates_by_the_sign_of_the_advantage():
    # Ratios 2, 2 and 1; tau 1 for A > 0, 2 else. sigmoid(1) = 0.731059, sigmoid(2) = 0.880797, sigmoid(0) = 0.5.
    loss, grad, metrics, _ = run(
        [[LOG2, 0.0], [LOG2]], [1.0, -1.0], policy_loss="sapo", soft_gate_positive=1.0, soft_gate_negative=2.0
    )
    up, down = 0.731059, 0.880797
    # Two samples: every token weighs 1/2.
    assert loss == pytest.approx((-4 * up - 4 * 0.5 + 2 * down) / 2, rel=1e-5)
    # d loss / d log pi = -4 gate (1 - gate) r A: what is left of the plain ratio's -r A.
    left = [4 * up * (1 - up), 1.0, 4 * down * (1 - down)]
    assert grad == pytest.approx([-2 * left[0] / 2, -1.0 / 2, 2 * left[2] / 2], rel=1e-4)
    assert metrics["rl/soft_gate_mean"] == pytest.approx(sum(left) / 3, rel=1e-4)


def test_decoupled_ppo_reads_the_proximal_policy_off_the_versions():
    # Trainer at version 5. Version 5 and 4: prox = mu, so plain PPO. Version 1 (lag 4): a = 3/4.
    rl = {"policy_loss": "decoupled_ppo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    loss, grad, _, _ = run([[LOG2, LOG2]], [1.0], versions=[[5, 4]], trainer_version=5, **rl)
    assert loss == pytest.approx(-2.4) and grad == [0.0, 0.0]
    # log ratio 0.4: prox - mu = 0.3, pi - prox = 0.1: inside the range, weight e^0.3.
    loss, grad, metrics, _ = run([[0.4]], [1.0], versions=[[1]], trainer_version=5, **rl)
    assert loss == pytest.approx(-math.exp(0.3) * math.exp(0.1))
    assert grad == pytest.approx([-math.exp(0.4)])
    assert metrics["rl/behavior_weight_mean"] == pytest.approx(math.exp(0.3))
    # The behaviour weight is truncated at `clamp`.
    loss, _, _, _ = run([[0.4]], [1.0], versions=[[1]], trainer_version=5, clamp=1.2, **rl)
    assert loss == pytest.approx(-1.2 * math.exp(0.1))


def test_truncated_correction_on_ppo_is_the_default_loss_gradient():
    ratios, advantages = [[0.3, 2.0, -1.0], [0.1]], [1.5, -0.5]
    plain = run(ratios, advantages, policy_loss="reinforce", clamp=5.0)[1]
    for name in ("reinforce", "ppo", "gspo", "cispo"):
        rl = {"policy_loss": name, "importance_correction": "truncate", "importance_high": 5.0}
        # GSPO's gradient is spread evenly over the tokens of a sample, so only its sum is compared.
        grad = run(ratios, advantages, **rl)[1]
        if name == "gspo":
            assert sum(grad[:3]) == pytest.approx(sum(plain[:3])) and grad[3] == pytest.approx(plain[3])
        else:
            assert grad == pytest.approx(plain)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("truncate", [0.25, 1.0, 2.0]), ("mask", [0.25, 1.0, 0.0]), ("icepop", [0.0, 1.0, 0.0])],
)
def test_token_corrections(mode, expected):
    # rho = 1/4, 1, 4 with range [1/2, 2], A = -1: the gradient is +factor.
    _, grad, metrics, _ = run([[-2 * LOG2, 0.0, 2 * LOG2]], [-1.0], policy_loss="ppo", importance_correction=mode)
    assert grad == pytest.approx(expected)
    assert metrics["rl/importance_weight_mean"] == pytest.approx(sum(expected) / 3)


def test_sequence_correction_uses_the_product():
    # Sample 1: rho = 2 * 2 = 4 > 2 is cut to 2; sample 2: rho = 1.
    _, grad, _, _ = run(
        [[LOG2, LOG2], [0.0]],
        [-1.0, -1.0],
        policy_loss="ppo",
        importance_correction="truncate",
        importance_level="sequence",
    )
    assert grad == pytest.approx([1.0, 1.0, 0.5])
    _, grad, metrics, _ = run(
        [[LOG2, LOG2], [0.0]],
        [-1.0, -1.0],
        policy_loss="ppo",
        importance_correction="mask",
        importance_level="sequence",
    )
    assert grad == pytest.approx([0.0, 0.0, 0.5])
    assert metrics["rl/importance_cut_fraction"] == pytest.approx(2 / 3)


def test_geometric_mask_drops_samples_and_keeps_the_ratio():
    # Geometric means: sqrt(4 * 1) = 2 is kept at high = 2, sqrt(16 * 1) = 4 is not.
    _, grad, _, _ = run(
        [[2 * LOG2, 0.0], [4 * LOG2, 0.0]],
        [-1.0, -1.0],
        policy_loss="ppo",
        importance_correction="geometric_mask",
        importance_high=2.0001,
    )
    assert grad == pytest.approx([2.0, 0.5, 0.0, 0.0])


def test_value_head_gives_advantages_per_token():
    # Values 0.5, 0.4, reward 1 at the end, gamma = lambda = 1: A = 0.5 and 0.6, returns 1 and 1.
    loss, grad, metrics, value_grad = run(
        [[0.0, 0.0]], [1.0], values=[0.5, 0.4], advantage_estimator="gae", value_loss_coef=0.1
    )
    assert grad == pytest.approx([-0.5, -0.6])
    assert loss == pytest.approx(0.5 * 2 + 0.6 * 2 + 0.1 * (0.25 + 0.36) / 2)
    assert value_grad[0, :2].tolist() == pytest.approx([0.1 * -0.5, 0.1 * -0.6])
    assert metrics["rl/value_loss"] == pytest.approx((0.25 + 0.36) / 4)
    with pytest.raises(ValueError, match="gae"):
        run([[0.0]], [1.0], advantage_estimator="gae")


def test_what_tokens_earn_goes_into_the_recursion():
    # gamma 0.9, lambda 0.5; rewards -0.1 and 1 - 0.2. delta_1 = 0.8 - 0.4; delta_0 = -0.1 + 0.36 - 0.5 = -0.24;
    # A_0 = -0.24 + 0.45 * 0.4. The second sample earns nothing besides its reward: A = 2.
    _, grad, _, _ = run(
        [[0.0, 0.0], [0.0]],
        [1.0, 2.0],
        values=[0.5, 0.4, 0.0],
        token_rewards=[-0.1, -0.2, 0.0],
        advantage_estimator="gae",
        value_loss_coef=0.1,
        gamma=0.9,
        gae_lambda=0.5,
    )
    # B = 2.
    assert grad == pytest.approx([0.06 / 2, -0.4 / 2, -2.0 / 2])


def test_negative_weights_of_a_value_head_are_cut_and_its_targets_are_not():
    # Values 0.5, 0.4, reward 0.45 at the end: A = -0.05 and 0.05, returns 0.45.
    _, grad, _, value_grad = run(
        [[0.0, 0.0]],
        [0.45],
        values=[0.5, 0.4],
        advantage_estimator="gae",
        value_loss_coef=0.1,
        relu_log_p_weights=True,
    )
    assert grad == pytest.approx([0.0, -0.05])
    assert value_grad[0, :2].tolist() == pytest.approx([0.1 * 0.05, 0.1 * -0.05])


@pytest.mark.parametrize(("name", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimators(name, expected):
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert token_kl(new, ref, name).item() == pytest.approx(expected)


def test_k3_is_right_where_e_to_the_r_and_1_cancel():
    # r = 1e-5: r^2 / 2 = 5e-11. In fp32 e^r - r - 1 is a multiple of 6e-8, or of 1e-7 below 0.
    new = torch.zeros(1, requires_grad=True)
    value = token_kl(new, torch.tensor([1e-5]), "k3")
    value.sum().backward()
    assert value.item() == pytest.approx(5e-11, rel=0.05)
    assert new.grad.item() == pytest.approx(-1e-5, rel=0.05)


def test_m4_kl_is_zero_without_gradient_at_the_reference_and_bounded_far_from_it():
    new = torch.tensor([-1.0, -1e4], requires_grad=True)
    kl = token_kl(new, torch.tensor([-1.0, 0.0]), "k3")
    kl.sum().backward()
    assert kl[0].item() == 0.0 and new.grad[0].item() == 0.0
    assert kl[1].item() == pytest.approx(math.exp(5) - 6) and new.grad[1].item() == 0.0
