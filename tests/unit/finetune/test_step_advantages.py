"""The step stage of advantages against the same formulas on lists, and with numbers worked out by hand (M5)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from itertools import accumulate

import numpy as np
import pytest
import torch
from fakes.two_ranks import on_two_ranks
from msgspec.structs import replace

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner, finish_advantages
from pipelinerl.rl.advantages import ADVANTAGES
from pipelinerl.rl.microbatch import collate, sentinel, token_weights

OPTIONS = [
    {
        "advantage_estimator": name,
        **({"normalize_reward": normalize} if name not in ("gae", "reinforce_baseline") else {}),
        "relu_log_p_weights": cut,
        "reward_minus_kl_coef": kl,
    }
    for name, normalize, cut, kl in itertools.product(ADVANTAGES, (0, 1), (0, 1), (0.0, 0.1))
]


def with_reference(samples, seed=3):
    """Log-probs as a server gives them: float32 values in float64."""
    draw = random.Random(seed)

    def rounded(values):
        return [float(np.float32(value)) for value in values]

    return [
        replace(s, logprobs=rounded(s.logprobs), ref_logprobs=rounded(-draw.uniform(0.5, 6) for _ in s.logprobs))
        for s in samples
    ]


def collated(samples, plan=None, packed=True):
    weights = token_weights(samples)
    plan = [list(range(len(samples)))] if plan is None else plan
    return [collate(samples, indices, weights=weights, packed=packed, pad_id=0) for indices in plan]


def by_sample(micro_batches, name="advantages"):
    """Values of the trained tokens by index of the sample."""
    return {
        index: getattr(batch, name)[batch.mask & (batch.segment_ids == segment)].tolist()
        for batch in micro_batches
        for segment, index in enumerate(batch.indices)
    }


def on_lists(samples, rl):
    """Advantages (and token rewards) of every trained token, in Python floats."""
    rewards = [
        [-rl.reward_minus_kl_coef * (mu - ref) for mu, ref in zip(s.logprobs, s.ref_logprobs, strict=True)]
        for s in samples
    ]
    values = [[s.advantage] * s.num_trained_tokens for s in samples]
    if rl.advantage_estimator == "gae":
        return values, rewards
    if rl.reward_minus_kl_coef:
        to_go = [list(accumulate(reversed(row)))[::-1] for row in rewards]
        values = [[a + kl for a, kl in zip(*pair, strict=True)] for pair in zip(values, to_go, strict=True)]
    if rl.normalizes_over_step:
        flat = [value for row in values for value in row]
        middle = math.fsum(flat) / len(flat)
        scale = math.sqrt(math.fsum((value - middle) ** 2 for value in flat) / len(flat)) + 1e-8
        values = [[(value - middle) / scale for value in row] for row in values]
    if rl.relu_log_p_weights:
        values = [[max(value, 0.0) for value in row] for row in values]
    return values, rewards


@pytest.mark.parametrize("packed", [True, False])
def test_every_option_equals_the_lists_bit_by_bit(kit, packed):
    samples = with_reference(kit.samples(12, masked_every=5))
    plan = [[0, 1, 2, 3, 4], [6], [5, 7, 8, 9, 10, 11]]
    for options in OPTIONS:
        rl = RLConfig(**options)
        found = finish_advantages(collated(samples, plan, packed), samples, rl, Ranks())
        advantages, rewards = ([np.asarray(row, np.float32).tolist() for row in rows] for rows in on_lists(samples, rl))
        assert by_sample(found) == dict(enumerate(advantages))
        if rl.advantage_estimator == "gae" and rl.reward_minus_kl_coef:
            assert by_sample(found, "token_rewards") == dict(enumerate(rewards))
        else:
            assert all(batch.token_rewards is None for batch in found)
        assert all(not batch.advantages[~batch.mask].any() for batch in found)


def hand_made(kit, advantages, kl, **changes):
    """Samples with these advantages whose trained tokens have log mu - log ref = `kl`."""
    (longest,) = [s for s in kit.samples(8) if s.num_trained_tokens >= 3][:1]
    cut = longest.prompt_tokens

    def made(advantage, values):
        n = len(values)
        return replace(
            longest,
            input_ids=longest.input_ids[: cut + n],
            labels=longest.labels[: cut + n],
            logprobs=[-0.5] * n,
            ref_logprobs=[-0.5 - value for value in values],
            version_spans=[type(longest.version_spans[0])(0, 0, n)],
            advantage=advantage,
        )

    return [made(*pair) for pair in zip(advantages, kl, strict=True)]


@pytest.mark.parametrize(
    ("advantages", "kl", "rl", "expected"),
    [
        # A token pays for itself and for what follows in its own sample.
        ([1.0, -1.0], [[0.5, 0.1, 0.4], [0.0, 2.0]], {}, [0.9, 0.95, 0.96, -1.2, -1.2]),
        # KL to go times 0.5: 1, 0.5 and 0; values -0.5, 0, -0.5, -0.5. Mean -3/8, variance 3/64.
        (
            [0.5, -0.5],
            [[1.0, 1.0], [0.0, 0.0]],
            {"advantage_estimator": "reinforce_baseline", "reward_minus_kl_coef": 0.5},
            [-1 / math.sqrt(3), math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)],
        ),
        # Negative values are cut after the KL: 1 - (1.5, 0.5) and -1 - (-2, 0).
        (
            [1.0, -1.0],
            [[1.0, 0.5], [-2.0, 0.0]],
            {"relu_log_p_weights": True, "reward_minus_kl_coef": 1.0},
            [0.0, 0.5, 1.0, 0.0],
        ),
        # Values 3 (1 token) and 1 (3 tokens): mean 1.5, variance (2.25 + 3 * 0.25) / 4 = 0.75.
        (
            [3.0, 1.0],
            [[0.0], [0.0] * 3],
            {"normalize_reward": True, "reward_minus_kl_coef": 0.0},
            [1.5 / math.sqrt(0.75), *[-0.5 / math.sqrt(0.75)] * 3],
        ),
    ],
)
def test_m5_by_hand(kit, advantages, kl, rl, expected):
    samples = hand_made(kit, advantages, kl)
    (found,) = finish_advantages(collated(samples), samples, RLConfig(**{"reward_minus_kl_coef": 0.1, **rl}), Ranks())
    assert found.advantages[found.mask].tolist() == pytest.approx(expected, abs=1e-6)


def test_two_ranks_normalize_over_the_tokens_of_both(kit):
    rl = RLConfig(reward_minus_kl_coef=0.1, advantage_estimator="reinforce_baseline", relu_log_p_weights=True)
    samples = with_reference(kit.samples(12))
    plan = [list(range(7)), list(range(7, 12))]
    alone = finish_advantages(collated(samples, plan), samples, rl, Ranks())
    shares = [[batch] for batch in collated(samples, plan)]
    # A rank may have nothing to train but a sentinel.
    shares[1].append(dataclasses.replace(sentinel(pad_id=0), ref_logprobs=torch.zeros(1, 2)))
    found = on_two_ranks(lambda ranks: finish_advantages(shares[ranks.rank], samples, rl, ranks))
    torch.testing.assert_close(found[0][0].advantages, alone[0].advantages)
    torch.testing.assert_close(found[1][0].advantages, alone[1].advantages)
    assert not found[1][1].advantages.any()


def test_m1_equal_advantages_are_zero_and_nothing_trained_is_fine(kit):
    rl = RLConfig(advantage_estimator="reinforce_baseline")
    samples = [replace(s, advantage=0.3 if n else 0.1 + 0.2) for n, s in enumerate(kit.samples(4))]
    (found,) = finish_advantages(collated(samples), samples, rl, Ranks())
    assert not found.advantages.any()
    (found,) = finish_advantages([sentinel(pad_id=0)], samples, rl, Ranks())
    assert not found.advantages.any()


def test_m4_without_a_reference_the_step_refuses(kit):
    config = kit.config(rl={"reward_minus_kl_coef": 0.1})
    runner = StepRunner(PlainBackend(kit.policy(), config, Ranks()), config, Ranks())
    with pytest.raises(ValueError, match=r"reward_minus_kl_coef"):
        runner.micro_batches(kit.batch(kit.samples(4)))


@pytest.mark.parametrize("from_servers", [True, False])
def test_the_step_charges_kl_once_whoever_computed_the_reference(kit, from_servers):
    class Reference:
        def logprobs(self, micro_batches):
            return [torch.full_like(batch.old_logprobs, -9.0) for batch in micro_batches]

    rl = RLConfig(reward_minus_kl_coef=0.1)
    config = kit.config(rl=rl.model_dump())
    reference = None if from_servers else Reference()
    backend = PlainBackend(kit.policy(), config, Ranks())
    runner = StepRunner(backend, config, Ranks(), reference=reference)
    plain = with_reference(kit.samples(4))
    scored = [replace(s, ref_logprobs=[-9.0] * s.num_trained_tokens) for s in plain]
    sent = scored if from_servers else [replace(s, ref_logprobs=[]) for s in plain]
    (charged,) = runner.micro_batches(kit.batch(sent, plan=[[[0, 1, 2, 3]]]))
    expected, _ = on_lists(scored, rl)
    assert by_sample([charged]) == dict(enumerate(np.asarray(row, np.float32).tolist() for row in expected))
