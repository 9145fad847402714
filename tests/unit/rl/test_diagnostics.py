"""ESS, log-prob differences, quantiles and lag of a step, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from rl_samples import collated, diagnostics_of, make_sample

from pipelinerl.rl.diagnostics import DiagnosticsSum
from pipelinerl.rl.loss import LossInputs
from pipelinerl.rl.microbatch import sentinel


def inputs_for(log_ratios, spans=None, trainer_version=3):
    n = len(log_ratios)
    batch = collated([make_sample([1], [2] * n, logprobs=[-6.0] * n, spans=spans)])
    new = torch.tensor([[*[-6.0 + r for r in log_ratios], 0.0]])
    return LossInputs.of(batch, new, trainer_version=trainer_version)


def test_ess_before_and_after_clamping():
    # w = 1, 1, 1, 9: before (12^2) / (4 * 84) = 0.4286, clamped at 5: (8^2) / (4 * 28) = 0.5714.
    values = diagnostics_of(inputs_for([0, 0, 0, math.log(9)])).values()
    assert values["finetune/ess"] == pytest.approx(144 / 336, rel=1e-5)
    assert values["finetune/ess_after_clamp"] == pytest.approx(64 / 112, rel=1e-5)
    assert values["rl/ratio_over_clamp_fraction"] == 0.25
    assert values["rl/ratio_mean"] == pytest.approx(3.0, rel=1e-5)
    assert values["rl/ratio_max"] == pytest.approx(9.0, rel=1e-5)


def test_differences_and_kl():
    values = diagnostics_of(inputs_for([0.5, -0.5])).values()
    assert values["finetune/logprob_abs_diff_mean"] == pytest.approx(0.5)
    assert values["rl/logprob_abs_diff_max"] == pytest.approx(0.5)
    assert values["rl/logprob_abs_diff_p99"] == pytest.approx(0.5, abs=0.0051)
    k3 = (math.exp(0.5) - 0.5 - 1 + math.exp(-0.5) + 0.5 - 1) / 2
    assert values["finetune/kl_sampler_trainer"] == pytest.approx(k3, rel=1e-5)


def test_entropy_estimate_is_the_entropy_of_the_policy_in_training():
    """Tokens drawn by another policy: the weights make up for it."""
    g = torch.Generator().manual_seed(0)
    sampler, policy = (torch.randn(6, generator=g).log_softmax(-1) for _ in range(2))
    drawn = torch.multinomial(sampler.exp(), 50_000, replacement=True, generator=g)
    batch = collated([make_sample([1], [2] * len(drawn), logprobs=sampler[drawn].tolist())])
    inputs = LossInputs.of(batch, torch.cat([policy[drawn], torch.zeros(1)])[None])
    expected = -(policy.exp() * policy).sum().item()
    assert diagnostics_of(inputs).values()["rl/entropy_estimate"] == pytest.approx(expected, rel=0.02)


def test_quantiles_within_one_bin():
    ratios = [k / 100 - 0.5 for k in range(100)]
    values = diagnostics_of(inputs_for(ratios)).values()
    assert values["rl/log_ratio_p50"] == pytest.approx(-0.01, abs=0.011)
    assert values["rl/log_ratio_p01"] == pytest.approx(-0.5, abs=0.011)
    assert values["rl/log_ratio_p99"] == pytest.approx(0.48, abs=0.011)


def test_lag_by_token_across_an_update():
    # Tokens 0-1 from version 1, token 2 from version 3; the trainer is at 3: lags 2, 2, 0.
    values = diagnostics_of(inputs_for([0, 0, 0], spans=[(1, 0, 2), (3, 2, 3)])).values()
    assert values["finetune/lag_mean_versions"] == pytest.approx(4 / 3)
    assert values["finetune/lag_max_versions"] == 2
    assert values["rl/lag_share_0"] == pytest.approx(1 / 3)
    assert values["rl/lag_share_2_3"] == pytest.approx(2 / 3)


def test_micro_batches_add_up_and_sentinels_add_nothing():
    whole = diagnostics_of(inputs_for([0.1, -0.2, 1.9, 0.4])).values()
    empty = diagnostics_of(LossInputs.of(sentinel(pad_id=0), torch.zeros(1, 2)))
    parts = diagnostics_of(inputs_for([0.1])) + diagnostics_of(inputs_for([-0.2, 1.9, 0.4])) + empty
    assert parts.values() == pytest.approx(whole)
    assert empty.values() == {}


@pytest.mark.parametrize("max_waiting_tokens", [1, 3, 100])
def test_a_step_is_the_same_whenever_its_tokens_are_summed_up(monkeypatch, max_waiting_tokens):
    monkeypatch.setattr("pipelinerl.rl.diagnostics.MAX_WAITING_TOKENS", max_waiting_tokens)
    parts = [inputs_for([0.1]), inputs_for([-0.2, 1.9], trainer_version=9), inputs_for([0.4])]
    one_by_one = diagnostics_of(parts[0])
    for part in parts[1:]:
        one_by_one = one_by_one + diagnostics_of(part)
    tokens = DiagnosticsSum(5.0)
    for part in parts:
        tokens.add(part)
    found = tokens.total()
    torch.testing.assert_close(found.sums, one_by_one.sums)
    torch.testing.assert_close(found.maxima, one_by_one.maxima)


def test_the_numerical_gap_is_that_of_samples_of_the_weights_in_training():
    """Tokens behind an update were sampled with keys and values of the weights before it."""
    mixed = inputs_for([1.0, -0.5, 4.0], spans=[(1, 0, 2), (3, 2, 3)])
    older = inputs_for([2.0], spans=[(2, 0, 1)])
    whole = inputs_for([0.25, -0.75], spans=[(3, 0, 2)])
    values = diagnostics_of(mixed, older, whole).values()
    assert values["rl/on_policy_tokens"] == 2
    assert values["rl/logprob_abs_diff_on_policy"] == pytest.approx(0.5)
    without = diagnostics_of(mixed).values()
    assert "rl/logprob_abs_diff_on_policy" not in without and "rl/on_policy_tokens" not in without


def test_what_is_not_finite_elsewhere_stays_out_of_the_numerical_gap():
    values = diagnostics_of(inputs_for([math.nan], spans=[(1, 0, 1)]), inputs_for([0.25], spans=[(3, 0, 1)])).values()
    assert values["rl/logprob_abs_diff_on_policy"] == pytest.approx(0.25)
    assert math.isnan(values["finetune/logprob_abs_diff_mean"])
    broken = diagnostics_of(inputs_for([math.nan], spans=[(3, 0, 1)])).values()
    assert math.isnan(broken["rl/logprob_abs_diff_on_policy"])
