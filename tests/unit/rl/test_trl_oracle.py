"""Our losses and advantages against the public implementation in `trl` (1.16): same inputs, fp64, 1e-6.

Only the loss method of its trainer is called, on a stand-in object that holds the settings. Where the two name
things differently the test maps one to the other and says so.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.rl.advantages import AdvantageInputs, group_advantages
from pipelinerl.rl.loss import Coefficients, LossInputs, compute_loss

pytestmark = pytest.mark.slow
LENGTHS = [3, 5, 1, 4]
MAX_LENGTH = 6


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    old = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
    new = old + torch.randn(shape, generator=g, dtype=torch.float64) * 0.4
    ref = old + torch.randn(shape, generator=g, dtype=torch.float64) * 0.2
    advantages = torch.randn(shape[0], generator=g, dtype=torch.float64)
    return mask, old, new, ref, advantages


def trl_loss(loss_type, new, old, ref, advantages, mask, ratio=None, entropy=None, **settings):
    pytest.importorskip("trl", reason="the oracle is in the extra `oracle`")
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = SimpleNamespace(
        use_bias_correction_kl=False,
        delta=settings.pop("delta", None),
        steps_per_generation=1,
        sapo_temperature_pos=1.5,
        sapo_temperature_neg=2.0,
    )
    values = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": ratio is not None,
        "vllm_importance_sampling_correction": ratio is not None,
        "max_completion_length": MAX_LENGTH,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    stand_in = SimpleNamespace(
        **{**values, **settings},
        args=args,
        loss_type=loss_type,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            new,
            torch.zeros_like(new) if entropy is None else entropy,
            None,
        ),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": ratio,
    }
    return GRPOTrainer._compute_loss(stand_in, None, inputs)


def weights_of(aggregation, mask):
    lengths = mask.sum(1, keepdim=True).double()
    per_sample = {
        "sample": torch.full_like(lengths, 1 / len(LENGTHS)),
        "sample_mean": 1 / (len(LENGTHS) * lengths),
        "token": torch.full_like(lengths, 1 / mask.sum().item()),
        "constant_length": torch.full_like(lengths, 1 / (len(LENGTHS) * MAX_LENGTH)),
    }[aggregation]
    return per_sample * mask


def our_loss(new, old, ref, advantages, mask, aggregation, kl=0.0, entropy=None, bonus=0.0, **rl):
    inputs = LossInputs(
        new_logprobs=torch.where(mask, new, 0.0),
        old_logprobs=torch.where(mask, old, 0.0),
        ref_logprobs=torch.where(mask, ref, 0.0),
        advantages=advantages[:, None] * mask,
        mask=mask,
        weights=weights_of(aggregation, mask),
        segment_ids=torch.arange(len(LENGTHS))[:, None].expand(mask.shape),
        versions=torch.zeros(mask.shape, dtype=torch.long),
        num_segments=len(LENGTHS),
        step_tokens=int(mask.sum()),
        entropy=entropy,
    )
    return compute_loss(inputs, RLConfig(**rl), Coefficients(kl=kl, entropy=bonus))[0]


def compare(ours, theirs):
    mask, old, new, ref, advantages = tensors()
    results = []
    for function in (ours, theirs):
        leaf = new.clone().requires_grad_()
        loss = function(leaf, old, ref, advantages, mask)
        (grad,) = torch.autograd.grad(loss, leaf)
        results.append((loss.detach(), grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("grpo", "sample_mean"), ("dapo", "token"), ("dr_grpo", "constant_length")]
)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_ppo_clip(loss_type, aggregation, beta):
    compare(
        lambda *x: our_loss(*x, aggregation, kl=beta, policy_loss="ppo", epsilon_high=0.28),
        lambda n, o, r, a, m: trl_loss(loss_type, n, o, r, a, m, beta=beta, epsilon_high=0.28),
    )


def test_dual_clip_is_their_delta():
    compare(
        lambda *x: our_loss(*x, "sample_mean", policy_loss="ppo", dual_clip=1.5),
        lambda n, o, r, a, m: trl_loss("grpo", n, o, r, a, m, delta=1.5),
    )


def test_gspo():
    compare(
        lambda *x: our_loss(*x, "sample_mean", policy_loss="gspo", epsilon_low=0.05, epsilon_high=0.05),
        lambda n, o, r, a, m: trl_loss(
            "grpo", n, o, r, a, m, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.05
        ),
    )


def test_their_length_unbiased_sequence_loss_is_gspo_summed_over_the_sample():
    compare(
        lambda *x: our_loss(*x, "sample", policy_loss="gspo", epsilon_low=0.05, epsilon_high=0.05),
        lambda n, o, r, a, m: trl_loss(
            "luspo", n, o, r, a, m, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.05
        ),
    )


def test_entropy_bonus():
    # Theirs is always a mean over tokens; ours has the weights of the loss, which are that with `token`.
    def entropy_of(new):
        return new.square() + 0.3 * new

    compare(
        lambda n, *x: our_loss(n, *x, "token", policy_loss="ppo", entropy=entropy_of(n), bonus=0.05),
        lambda n, o, r, a, m: trl_loss(
            "dapo",
            n,
            o,
            r,
            a,
            m,
            entropy=entropy_of(n),
            _entropy_bonus_enabled=True,
            use_adaptive_entropy=False,
            entropy_coef=0.05,
        ),
    )


def test_sapo():
    compare(
        lambda *x: our_loss(*x, "sample_mean", policy_loss="sapo", soft_gate_positive=1.5, soft_gate_negative=2.0),
        lambda n, o, r, a, m: trl_loss("sapo", n, o, r, a, m),
    )


def test_cispo_without_lower_bound():
    # Their epsilon_high is the bound itself, ours is its distance from 1; they have no lower bound.
    compare(
        lambda *x: our_loss(*x, "token", policy_loss="cispo", epsilon_low=0.999999, epsilon_high=0.3),
        lambda n, o, r, a, m: trl_loss("cispo", n, o, r, a, m, epsilon_high=1.3),
    )


def test_default_loss_is_cispo_with_the_bound_c():
    compare(
        lambda *x: our_loss(*x, "token", policy_loss="reinforce", clamp=1.3),
        lambda n, o, r, a, m: trl_loss("cispo", n, o, r, a, m, epsilon_high=1.3),
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "icepop"])
def test_importance_correction(level, mode):
    # Their ratio is made before the loss, from the policy before the step; ours is that policy by construction.
    def theirs(new, old, ref, advantages, mask):
        difference = (new.detach() - old) * mask
        if level == "sequence":
            difference = difference.sum(-1, keepdim=True)
        ratio = difference.exp()
        if mode == "truncate":
            ratio = ratio.clamp(max=1.2)
        else:
            ratio = ratio.masked_fill(ratio > 1.2, 0.0)
            if mode == "icepop":
                ratio = ratio.masked_fill(ratio < 0.8, 0.0)
        return trl_loss("dapo", new, new.detach(), ref, advantages, mask, ratio=ratio)

    compare(
        lambda *x: our_loss(
            *x,
            "token",
            policy_loss="ppo",
            importance_correction=mode,
            importance_level=level,
            importance_high=1.2,
            **({"importance_low": 0.8} if mode == "icepop" else {}),
        ),
        theirs,
    )


def test_grpo_and_rloo_advantages():
    # Their formulas are inside a long method: mean and std (n - 1, + 1e-4) of each group; (sum - r) / (n - 1).
    rewards = torch.tensor([0.3, 1.0, -0.5, 0.25, 0.7], dtype=torch.float64)
    grpo = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    loo = rewards - (rewards.sum() - rewards) / 4
    group = AdvantageInputs([[r] for r in rewards.tolist()])
    for name, expected in (("grpo", grpo), ("rloo", loo)):
        found = group_advantages(group, RLConfig(advantage_estimator=name))
        assert [a[0] for a in found] == pytest.approx(expected.tolist(), abs=1e-12)
