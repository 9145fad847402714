"""KL in the reward: behind baseline and filters, token by token, before the normalisation of the step."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from preprocess_groups import group, sample

from pipelinerl.config.finetune import FinetuneConfig, RLConfig
from pipelinerl.preprocess.intake import Intake
from pipelinerl.preprocess.recovery import ResumePoint
from pipelinerl.preprocess.scoring import finish_step, score_group
from pipelinerl.rl.advantages import ADVANTAGES
from pipelinerl.streams.base import Entry


def with_kl(sample_id, reward, kl, **changes):
    """A sample whose trained tokens have log mu - log ref = `kl`."""
    refs = [-0.5 - value for value in kl]
    return sample(sample_id, reward, output=len(kl), ref_logprobs=refs, **changes)


def by_token(samples, **rl):
    config = RLConfig(**rl)
    return [item.advantages for item in finish_step(score_group(samples, [], config), config)]


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [("rloo", 1.0, -1.0), ("dr_grpo", 0.5, -0.5), ("reinforce", 1.0, 0.0)],
)
def test_a_token_pays_for_itself_and_for_what_follows(estimator, first, second):
    # KL to go: 1.0, 0.5, 0.4, 0.4; coefficient 0.1.
    samples = [with_kl("g/r0/s0", 1.0, [0.5, 0.1, 0.0, 0.4]), with_kl("g/r1/s0", 0.0, [0.0, 0.0])]
    got = by_token(samples, advantage_estimator=estimator, reward_minus_kl_coef=0.1)
    assert got[0] == pytest.approx([first - 0.1, first - 0.05, first - 0.04, first - 0.04])
    assert got[1] == pytest.approx([second, second])


def test_each_sample_of_a_rollout_pays_for_its_own_tokens():
    samples = [with_kl("g/r0/s0", 1.0, [1.0, 0.0]), with_kl("g/r0/s1", 1.0, [0.0, 2.0]), with_kl("g/r1/s0", 0.0, [0.0])]
    got = by_token(samples, reward_minus_kl_coef=0.1)
    assert [value for values in got for value in values] == pytest.approx([0.9, 1.0, 0.8, 0.8, -1.0])


def test_rewards_in_place_of_advantages_pay_too():
    got = by_token([with_kl("g/r0/s0", 1.0, [1.0, 2.0])], use_advantages=False, reward_minus_kl_coef=0.1)
    assert got == [pytest.approx([0.7, 0.8])]


def equal_group():
    return [with_kl(f"g/r{k}/s0", 1.0, [0.05 * k] * 4) for k in range(4)]


def test_the_spread_of_the_kl_is_not_divided_by_itself():
    """Four right answers: KL is the only difference, and it stays as small as its coefficient makes it."""
    got = by_token(equal_group(), advantage_estimator="grpo", reward_minus_kl_coef=1e-3)
    assert got[0] == [0.0] * 4
    # 0.15 a token, four tokens to go from the first one.
    assert got[3] == pytest.approx([-6e-4, -4.5e-4, -3e-4, -1.5e-4])


def test_a_group_of_equal_rewards_is_filtered_whatever_its_kl():
    rl = {"advantage_estimator": "grpo", "reward_minus_kl_coef": 1e-3, "filter_zero_advantage_groups": True}
    intake = Intake(FinetuneConfig(seq_length=16, rl=rl), ResumePoint())
    ((ready, rejections),) = intake.digest([Entry(0, group("g", samples=equal_group()))])
    assert ready.samples == () and [r.reason for r in rejections] == ["zero_advantage"] * 4


def test_the_normalisation_is_over_tokens_and_behind_the_kl():
    # Group mean: 0.5 and -0.5. KL to go of the first: 2, 1; coefficient 0.5: -0.5, 0; the second keeps -0.5, -0.5.
    # Mean -3/8, variance (3 / 64 + 9 / 64) / 4 = 3/64: deviations -1/8 and 3/8 over sqrt(3) / 8.
    samples = [with_kl("g/r0/s0", 1.0, [1.0, 1.0]), with_kl("g/r1/s0", 0.0, [0.0, 0.0])]
    got = by_token(samples, advantage_estimator="reinforce_baseline", reward_minus_kl_coef=0.5)
    low, high = -1 / math.sqrt(3), math.sqrt(3)
    assert [value for values in got for value in values] == pytest.approx([low, high, low, low])


def test_negative_advantages_are_cut_behind_the_kl():
    # 1 - (1.5, 0.5) and -1 - (-2, 0).
    samples = [with_kl("g/r0/s0", 1.0, [1.0, 0.5]), with_kl("g/r1/s0", 0.0, [-2.0, 0.0])]
    assert by_token(samples, relu_log_p_weights=True, reward_minus_kl_coef=1.0) == [[0.0, 0.5], [1.0, 0.0]]


def test_with_a_value_head_every_token_earns_its_share():
    rl = RLConfig(advantage_estimator="gae", reward_minus_kl_coef=0.1)
    (item,) = finish_step(score_group([with_kl("g/r0/s0", 1.0, [0.5, -0.1])], [], rl), rl)
    assert item.advantages == [1.0]
    assert item.token_rewards == pytest.approx([-0.05, 0.01])


def test_missing_reference_logprobs_are_named():
    rl = RLConfig(reward_minus_kl_coef=0.1)
    with pytest.raises(ValueError, match="got 0 ref_logprobs for 3 trained tokens"):
        finish_step(score_group([sample("g/r0/s0"), sample("g/r1/s0")], [], rl), rl)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
@pytest.mark.parametrize("normalize", [False, True])
def test_without_a_coefficient_reference_logprobs_change_no_bit(estimator, normalize):
    draw = random.Random(estimator)
    plain = [sample(f"g/r{k}/s0", draw.random(), output=draw.randint(1, 9)) for k in range(8)]
    scored = [msgspec.structs.replace(s, ref_logprobs=[draw.uniform(-3, 0) for _ in s.logprobs]) for s in plain]
    rl = {"advantage_estimator": estimator, "normalize_reward": normalize}
    assert by_token(scored, **rl) == by_token(plain, **rl)
    assert all(len(values) == 1 for values in by_token(scored, **rl))
