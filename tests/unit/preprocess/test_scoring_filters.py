"""Advantages of a group by rollout, and the table of rejections."""

from __future__ import annotations

import math
import sys
import types

import pytest
from msgspec.structs import replace
from preprocess_groups import sample

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.errors import ConfigError
from pipelinerl.preprocess.batcher import reject_stale, reject_untrainable, repeated_4grams
from pipelinerl.records import IGNORED_LABEL, VersionSpan
from pipelinerl.rl.advantages import score_group


def advantages(samples, rl=None, extra=()):
    return [item.advantage for item in score_group(samples, list(extra), rl or RLConfig())]


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


def test_the_length_penalty_is_part_of_the_baseline_and_not_of_the_recorded_reward():
    rl = RLConfig(overlong_buffer_tokens=4, overlong_limit_tokens=10, overlong_penalty=0.5)
    samples = [sample("g/r0/s0", 1.0, output=5), sample("g/r1/s0", 1.0, output=10)]
    # Leave-one-out baseline of 1.0 and 0.5: the shorter of two right answers is preferred.
    assert advantages(samples, rl) == pytest.approx([0.5, -0.5])
    assert [item.reward for item in score_group(samples, [], rl)] == [1.0, 1.0]


def user_advantages(group):
    """Reward of the sample minus a hundredth of the rollout's samples."""
    pairs = zip(group.rewards, group.samples, strict=True)
    return [[reward - len(samples) / 100 for reward in rewards] for rewards, samples in pairs]


def test_an_estimator_of_the_user_is_a_dotted_path(monkeypatch):
    samples = [sample("g/r0/s0", 1.0), sample("g/r0/s1", 1.0), sample("g/r1/s0", 0.0)]
    module = types.ModuleType("their_package")
    module.estimator = user_advantages
    monkeypatch.setitem(sys.modules, "their_package", module)
    rl = RLConfig(advantage_estimator="their_package.estimator")
    assert advantages(samples, rl, extra=[3.0]) == pytest.approx([0.98, 0.98, -0.01])
    module.estimator = lambda group: [[math.nan for _ in rewards] for rewards in group.rewards]
    with pytest.raises(ValueError, match="not finite"):
        advantages(samples, rl)
    module.estimator = lambda group: [[0.0]]
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        advantages(samples, rl)
    user_for_next = lambda group: []  # noqa: E731
    user_for_next.api_version = 2
    module.estimator = user_for_next
    for path in ("their_package.estimator", "their_package.missing", "no_such_package.f"):
        with pytest.raises(ConfigError) as error:
            advantages(samples, RLConfig(advantage_estimator=path))
        assert error.value.key == "finetune.rl.advantage_estimator"


def scored(*items, value=1.0):
    return [replace(item, advantage=value) for item in items]


def test_untrainable_samples_are_filtered_with_a_reason():
    config = FinetuneConfig(seq_length=10, rl=RLConfig(overlong_filtering=True))
    items = scored(
        sample("g/r0/s0", output=9),
        sample("g/r1/s0", output=8),
        sample("g/r2/s0", output=0),
        sample("g/r3/s0", finished=False),
    )
    kept, rejections = reject_untrainable(items, config)
    assert [item.id for item in kept] == ["g/r1/s0"]
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


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([*range(100, 140)], 0.0),
        ([1, 2, 3, 4] * 10, 1 - 4 / 37),
        ([*range(100, 120), *range(100, 120)], 17 / 37),
        ([7] * 31, None),
    ],
    ids=["all different", "a cycle of 4", "said twice", "too short"],
)
def test_repeated_4grams_by_hand(tokens, share):
    prompt = [1, 2, 3, 4] * 10
    labels = [*[IGNORED_LABEL] * len(prompt), *tokens]
    found = repeated_4grams(sample("g/r0/s0", input_ids=[*prompt, *tokens], labels=labels))
    assert found == (None if share is None else pytest.approx(share))
