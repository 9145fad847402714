"""Advantages of a group by rollout, and the table of rejections."""

from __future__ import annotations

import pytest
from preprocess_groups import sample

from pipelinerl.config.finetune import FinetuneConfig, RLConfig
from pipelinerl.preprocess.filters import reject_faulty, reject_stale, reject_untrainable
from pipelinerl.preprocess.scoring import finish_step, score_group
from pipelinerl.records import ScoredSample, VersionSpan


def advantages(samples, rl=None, extra=()):
    return [item.advantages[0] for item in score_group(samples, list(extra), rl or RLConfig())]


def test_m5_turns_of_a_rollout_share_its_advantage_and_count_once():
    # Rollout 0: three turns with reward 1; rollouts 1 and 2: one turn with 0 and 0.5.
    samples = [sample(f"g/r0/s{k}", 1.0) for k in range(3)] + [sample("g/r1/s0", 0.0), sample("g/r2/s0", 0.5)]
    assert advantages(samples) == pytest.approx([0.75, 0.75, 0.75, -0.75, 0.0])
    # The order of the samples does not matter.
    assert advantages(samples[::-1]) == pytest.approx([0.0, -0.75, 0.75, 0.75, 0.75])


def test_rollouts_without_samples_count_in_the_baseline():
    assert advantages([sample("g/r0/s0", 1.0), sample("g/r1/s0", 0.0)], extra=[0.0]) == pytest.approx([1.0, -0.5])


def test_step_rewards_become_returns():
    marked = {"metadata": {"step_reward": True}}
    samples = [sample("g/r0/s0", 0.0, **marked), sample("g/r0/s1", 1.0, **marked), sample("g/r1/s0", 0.0, **marked)]
    # gamma 0.5: returns 0.5 and 1. Rollout reward = mean over samples: 0.75; the other's is 0.
    assert advantages(samples, RLConfig(gamma=0.5)) == pytest.approx([0.5, 1.0, -0.75])


def test_a_soft_length_penalty_by_hand():
    rl = RLConfig(overlong_buffer_tokens=4, overlong_limit_tokens=10, overlong_penalty=0.5, use_advantages=False)
    samples = [sample(f"g/r{k}/s0", 1.0, output=tokens) for k, tokens in enumerate((5, 6, 7, 8, 10, 12))]
    assert advantages(samples, rl) == pytest.approx([1.0, 1.0, 0.875, 0.75, 0.5, 0.5])
    # The reward that is written down stays the task's own.
    assert [item.sample.reward for item in score_group(samples, [], rl)] == [1.0] * 6
    assert advantages(samples, RLConfig(use_advantages=False)) == [1.0] * 6
    # Leave-one-out baseline of 1.0 and 0.5: the shorter of two right answers is preferred.
    baseline = rl.model_copy(update={"use_advantages": True})
    assert advantages([samples[0], samples[4]], baseline) == pytest.approx([0.5, -0.5])


def test_rewards_in_place_of_advantages_and_relu():
    samples = [sample("g/r0/s0", 1.0), sample("g/r1/s0", -2.0)]
    assert advantages(samples, RLConfig(use_advantages=False)) == [1.0, -2.0]
    assert advantages(samples, RLConfig(relu_log_p_weights=True)) == [3.0, 0.0]
    # The value head needs the rewards as they are.
    assert advantages(samples, RLConfig(relu_log_p_weights=True, advantage_estimator="gae")) == [1.0, -2.0]


def test_negative_weights_are_cut_behind_the_normalisation():
    # Advantages 0.5 and -0.5 of equal length: normalised 1 and -1. Cut before, they would come out as 1 and -1 again.
    rl = RLConfig(advantage_estimator="reinforce_baseline", relu_log_p_weights=True)
    scored = score_group([sample("g/r0/s0", 1.0), sample("g/r1/s0", 0.0)], [], rl)
    assert [s.advantages[0] for s in finish_step(scored, rl)] == pytest.approx([1.0, 0.0])


def test_batch_normalisation_only_where_asked():
    scored = score_group([sample("g/r0/s0", 1.0), sample("g/r1/s0", 0.0)], [], RLConfig())
    assert finish_step(scored, RLConfig()) == scored
    rl = RLConfig(advantage_estimator="reinforce_baseline")
    assert [s.advantages[0] for s in finish_step(scored, rl)] == pytest.approx([1.0, -1.0])
    # The configuration refuses this one.
    assert finish_step(scored, RLConfig(advantage_estimator="gae", normalize_reward=True)) == scored


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": [-0.5, float("nan"), -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, -9999.0, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, float("-inf"), -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, 0.5, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, -0.5]}, "bad_lengths"),
        ({"ref_logprobs": [-0.5, -0.5, float("nan")]}, "bad_ref_logprob"),
        ({"reward": float("nan")}, "bad_reward"),
        ({"version_spans": [VersionSpan(0, 0, 2)]}, "bad_lengths"),
    ],
)
def test_faulty_samples_fail_with_a_reason(change, reason):
    good, rejections = reject_faulty([sample("g/r0/s0", **change), sample("g/r1/s0")])
    assert [s.id for s in good] == ["g/r1/s0"]
    assert [(r.fate, r.reason) for r in rejections] == [("failed", reason)]


def scored(*items, value=1.0):
    return [ScoredSample(sample=item, advantages=[value]) for item in items]


def test_untrainable_samples_are_filtered_with_a_reason():
    config = FinetuneConfig(seq_length=10, rl=RLConfig(overlong_filtering=True))
    items = scored(
        sample("g/r0/s0", output=9),
        sample("g/r1/s0", output=8),
        sample("g/r2/s0", output=0),
        sample("g/r3/s0", finished=False),
    )
    kept, rejections = reject_untrainable(items, config)
    assert [item.sample.id for item in kept] == ["g/r1/s0"]
    assert [(r.sample.id, r.reason) for r in rejections] == [
        ("g/r0/s0", "longer_than_seq_length"),
        ("g/r2/s0", "no_trained_tokens"),
        ("g/r3/s0", "overlong"),
    ]
    assert {r.fate for r in rejections} == {"filtered"}


def test_zero_advantage_groups():
    items = scored(sample("g/r0/s0"), sample("g/r1/s0"), value=0.0)
    off, on = (FinetuneConfig(rl=RLConfig(filter_zero_advantage_groups=flag)) for flag in (False, True))
    assert len(reject_untrainable(items, off)[0]) == 2
    assert [r.reason for r in reject_untrainable(items, on)[1]] == ["zero_advantage"] * 2
    mixed = scored(sample("g/r0/s0"), value=0.0) + scored(sample("g/r1/s0"), value=1.0)
    assert len(reject_untrainable(mixed, on)[0]) == 2


def test_groups_outside_the_range_of_mean_rewards():
    items = scored(sample("g/r0/s0"), sample("g/r1/s0"))

    def reasons(rewards, **bounds):
        return [r.reason for r in reject_untrainable(items, FinetuneConfig(rl=RLConfig(**bounds)), rewards)[1]]

    both = {"filter_reward_low": 0.0, "filter_reward_high": 1.0}
    assert reasons([1.0, 1.0]) == []
    assert reasons([1.0, 1.0], **both) == ["reward_range"] * 2
    assert reasons([0.0, 0.0], **both) == ["reward_range"] * 2
    assert reasons([1.0, 0.0], **both) == []
    # Rollouts that left no sample count: (1 + 1 - 4) / 3 < 0.
    assert reasons([1.0, 1.0, -4.0], filter_reward_low=0.0) == ["reward_range"] * 2
    assert reasons([1.0, 1.0, -4.0], filter_reward_high=1.0) == []


def test_staleness_looks_at_the_oldest_token():
    two = sample("g/r0/s0", version_spans=[VersionSpan(3, 0, 1), VersionSpan(5, 1, 3)])
    assert reject_stale(scored(two), 5, 2)[1] == []
    assert [r.reason for r in reject_stale(scored(two), 6, 2)[1]] == ["max_version_lag"]
    assert reject_stale(scored(two), 1000, None)[1] == []
    assert [r.reason for r in reject_stale(scored(two), 4, None)[1]] == ["rolled_back"]
