"""Properties of every policy loss with every importance correction, level, KL estimator and advantage family's inputs.

Parametrised over the registries and the literals of the configuration, so that a new method is covered when it is
registered: masked tokens get exactly no gradient, a sentinel adds exactly nothing, and everything stays finite under
extreme ratios and log-probs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rl_samples import collated, diagnostics_of, make_sample

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.config.keys import known_keys, values_of
from pipelinerl.rl.loss import POLICY_LOSSES, Coefficients, LossInputs, compute_loss
from pipelinerl.rl.microbatch import AGGREGATIONS, sentinel

ON = Coefficients(kl=0.1, entropy=0.1)
NAN = float("nan")


def choices(field):
    return values_of(f"finetune.rl.{field}")


def fitting(combination):
    """Without the keys that its loss and its correction do not have."""
    owners = {key.name.removeprefix("finetune.rl."): key for key in known_keys()}
    chosen = {f"finetune.rl.{key}": value for key, value in combination.items()}
    return {
        key: value
        for key, value in combination.items()
        if not owners[key].chooser or chosen[owners[key].chooser] in owners[key].owners
    }


# Every loss with every correction at both levels; KL estimators and dual clip take turns over them.
COMBINATIONS = [
    pytest.param(
        fitting(
            {
                "policy_loss": loss,
                "importance_correction": correction,
                "importance_level": level,
                "kl_estimator": estimator,
                "dual_clip": dual_clip,
            }
        ),
        id=f"{loss}-{correction}-{level}-{estimator}",
    )
    for loss, (number, (correction, level)), dual_clip in (
        (loss, numbered, (None, 3.0)[numbered[0] % 2])
        for loss in sorted(POLICY_LOSSES)
        for numbered in enumerate(itertools.product(choices("importance_correction"), choices("importance_level")))
    )
    for estimator in (choices("kl_estimator") if correction == "none" else choices("kl_estimator")[number % 3 :][:1])
]

LOGPROB = st.one_of(st.floats(-1e4, 0), st.sampled_from([0.0, -1e-30, -1e30, -9998.0]))
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, st.floats(-100, 100), st.booleans()), min_size=1, max_size=6)


def micro_batch(tokens, aggregation="sample"):
    """Two packed samples: one with the drawn tokens, trained or not, and one of two ordinary tokens."""
    old, _, ref, advantages, trained = (list(column) for column in zip(*tokens, strict=True))
    ids = list(range(2, 2 + len(tokens)))
    kept = [place for place, is_trained in enumerate(trained) if is_trained]
    drawn = make_sample(
        [1],
        ids,
        sample_id="0-0/r0/s0",
        logprobs=[old[place] for place in kept],
        ref_logprobs=[ref[place] for place in kept],
        spans=[(0, 0, len(kept))],
    )
    labels = [-100, *[token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]]
    ordinary = make_sample([1], [2, 3], sample_id="0-1/r0/s0", logprobs=[-1.0, -2.0], ref_logprobs=[-1.0, -1.0])
    per_token = [*(advantages[place] for place in kept), 0.5, -0.5]
    return collated([replace(drawn, labels=labels), ordinary], aggregation=aggregation, advantages=per_token)


def leaves(batch, tokens):
    """New log-probs, entropies and values: NaN wherever nothing is trained."""
    new = [*(token[1] for token in tokens), NAN, -1.1, -1.9, NAN]
    tensors = [torch.tensor([new]), torch.rand(1, len(new)), torch.randn(1, len(new)) * 10]
    return [torch.where(batch.mask, tensor, NAN).requires_grad_() for tensor in tensors]


def check_finite_and_masked(batch, tokens, rl):
    new, entropy, values = leaves(batch, tokens)
    inputs = LossInputs.of(batch, new, entropy=entropy, values=values, trainer_version=3)
    loss, metrics = compute_loss(inputs, rl, ON)
    loss.backward()
    assert torch.isfinite(loss)
    for leaf in (new, entropy, values):
        if leaf.grad is not None:
            assert torch.isfinite(leaf.grad).all()
            assert not leaf.grad[~batch.mask].any()
    assert all(math.isfinite(metric.item()) for metric in metrics.values())
    diagnostics = diagnostics_of(inputs, clamp=rl.weight_bound).values()
    assert all(math.isfinite(value) for value in diagnostics.values())


@pytest.mark.parametrize("combination", COMBINATIONS)
@settings(max_examples=5, deadline=None)
@given(tokens=TOKENS)
def test_m2_masked_tokens_have_no_gradient_and_everything_is_finite(combination, tokens):
    check_finite_and_masked(micro_batch(tokens), tokens, RLConfig(**combination))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@settings(max_examples=5, deadline=None)
@given(tokens=TOKENS)
def test_the_same_with_a_value_head_and_every_aggregation(aggregation, tokens):
    rl = RLConfig(advantage_estimator="gae", value_loss_coef=0.5, gae_lambda=0.9, gamma=0.99, aggregation=aggregation)
    check_finite_and_masked(micro_batch(tokens, aggregation), tokens, rl)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_m2_a_sentinel_adds_exactly_nothing(combination):
    """Whatever the model gives for it: loss, gradient and every metric are 0."""
    for estimator in ("rloo", "gae"):
        new, entropy, values = (torch.full((1, 2), NAN, requires_grad=True) for _ in range(3))
        batch = dataclasses.replace(sentinel(pad_id=0, step_tokens=10), ref_logprobs=torch.zeros(1, 2))
        inputs = LossInputs.of(batch, new, entropy=entropy, values=values, trainer_version=4)
        rl = RLConfig(**combination, advantage_estimator=estimator)
        loss, metrics = compute_loss(inputs, rl, ON)
        loss.backward()
        assert loss.item() == 0.0
        assert not any(leaf.grad.any() for leaf in (new, entropy, values) if leaf.grad is not None)
        assert all(metric.item() == 0.0 for metric in metrics.values())


@pytest.mark.parametrize("combination", COMBINATIONS)
@settings(max_examples=4, deadline=None)
@given(tokens=TOKENS)
def test_what_masked_tokens_hold_changes_nothing(combination, tokens):
    """Other log-probs under the masks: the same loss and gradient, bit by bit."""
    batch, rl = micro_batch(tokens), RLConfig(**combination)
    found = []
    for filler in (NAN, 0.0, -1e30):
        new = torch.where(batch.mask, leaves(batch, tokens)[0].detach(), filler).requires_grad_()
        entropy = torch.where(batch.mask, 0.5, filler)
        loss, _ = compute_loss(LossInputs.of(batch, new, entropy=entropy, trainer_version=3), rl, ON)
        loss.backward()
        found.append((loss.detach(), new.grad))
    assert all(torch.equal(loss, found[0][0]) and torch.equal(grad, found[0][1]) for loss, grad in found[1:])


def test_every_method_is_in_a_combination():
    used = [set(), set(), set()]
    for parameter in COMBINATIONS:
        (combination,) = parameter.values
        for seen, key in zip(used, ("policy_loss", "importance_correction", "kl_estimator"), strict=True):
            seen.add(combination[key])
    assert used == [set(POLICY_LOSSES), set(choices("importance_correction")), set(choices("kl_estimator"))]
