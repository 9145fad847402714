"""KL in the reward with the reference model beside the trainer: the numbers are those of the preprocessor's lists."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest
import torch

from pipelinerl.config.finetune import RLConfig
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.step_advantages import finish_advantages
from pipelinerl.preprocess.scoring import finish_step
from pipelinerl.rl.aggregation import step_scale
from pipelinerl.rl.batch import collate, sentinel

SETTINGS = [
    {"advantage_estimator": "rloo"},
    {"advantage_estimator": "rloo", "relu_log_p_weights": True},
    {"advantage_estimator": "reinforce_baseline"},
    {"advantage_estimator": "reinforce", "normalize_reward": True, "relu_log_p_weights": True},
    {"advantage_estimator": "reinforce", "use_advantages": False},
    {"advantage_estimator": "gae"},
]


def with_reference(samples, seed=3):
    draw = random.Random(seed)

    def scored(item):
        refs = [-draw.uniform(0.5, 6.0) for _ in item.sample.logprobs]
        return msgspec.structs.replace(item, sample=msgspec.structs.replace(item.sample, ref_logprobs=refs))

    return [scored(item) for item in samples]


def collated(samples, plan, packed):
    scale = step_scale(samples)
    return [collate(samples, indices, scale=scale, packed=packed, pad_id=0) for indices in plan]


class TwoRanks(Ranks):
    """One of two ranks of this process, which meet at a barrier. `box` holds what both gave."""

    def _reduce(self, values, operation):
        box, barrier = self.host_group
        box[self.rank] = list(values)
        barrier.wait(60)
        combine = {"SUM": sum, "MIN": min, "MAX": max}[operation.name]
        result = [combine(pair) for pair in zip(*box, strict=True)]
        barrier.wait(60)
        return result


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tensors_and_lists_agree(kit, settings, packed):
    rl = RLConfig(reward_minus_kl_coef=0.1, **settings)
    samples = with_reference(kit.samples(12, masked_every=5))
    plan = [[0, 1, 2, 3, 4], [6], [5, 7, 8, 9, 10, 11]]
    expected = collated(finish_step(samples, rl), plan, packed)
    found = finish_advantages(collated(samples, plan, packed), rl, Ranks())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.advantages, theirs.advantages, atol=1e-5, rtol=1e-5)
        if rl.advantage_estimator == "gae":
            torch.testing.assert_close(mine.token_rewards, theirs.token_rewards, atol=1e-6, rtol=1e-6)
        else:
            assert mine.token_rewards is None


def test_a_token_pays_for_what_follows_in_its_own_sample_only(kit):
    (item,) = with_reference([next(s for s in kit.samples(8) if s.sample.num_trained_tokens >= 3)])
    (batch,) = collated([item, item], [[0, 1]], packed=True)
    rl = RLConfig(reward_minus_kl_coef=0.5)
    (found,) = finish_advantages([batch], rl, Ranks())
    kl = [mu - ref for mu, ref in zip(item.sample.logprobs, item.sample.ref_logprobs, strict=True)]
    expected = [item.advantages[0] - 0.5 * sum(kl[t:]) for t in range(len(kl))]
    assert found.advantages[found.mask].tolist() == pytest.approx(expected * 2, abs=1e-5)
    assert not found.advantages[~found.mask].any()


def test_two_ranks_normalise_over_the_tokens_of_both(kit):
    rl = RLConfig(reward_minus_kl_coef=0.1, advantage_estimator="reinforce_baseline", relu_log_p_weights=True)
    samples = with_reference(kit.samples(12))
    alone = finish_advantages(collated(samples, [list(range(7)), list(range(7, 12))], True), rl, Ranks())
    shares = [collated(samples, [list(range(7))], True), collated(samples, [list(range(7, 12))], True)]
    # A rank may have nothing to train but a sentinel.
    shares[1].append(sentinel(pad_id=0, with_reference=True))
    meeting = ([None, None], threading.Barrier(2))
    found = [None, None]

    def work(rank):
        found[rank] = finish_advantages(shares[rank], rl, TwoRanks(rank, 2, host_group=meeting))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(found[0][0].advantages, alone[0].advantages)
    torch.testing.assert_close(found[1][0].advantages, alone[1].advantages)
    assert not found[1][1].advantages.any()


def test_equal_advantages_are_zero_and_nothing_trained_is_fine(kit):
    rl = RLConfig(reward_minus_kl_coef=0.1, advantage_estimator="reinforce_baseline")
    samples = [
        msgspec.structs.replace(
            item, advantages=[0.3], sample=msgspec.structs.replace(item.sample, ref_logprobs=item.sample.logprobs)
        )
        for item in kit.samples(4)
    ]
    (found,) = finish_advantages(collated(samples, [[0, 1, 2, 3]], True), rl, Ranks())
    assert not found.advantages.any()
    (found,) = finish_advantages([sentinel(pad_id=0, with_reference=True)], rl, Ranks())
    assert not found.advantages.any()


def test_without_a_reference_the_step_says_so(kit):
    config = kit.config(rl={"reward_minus_kl_coef": 0.1})
    runner = StepRunner(PlainBackend(kit.policy(), config, Ranks()), config, Ranks(), schedule_of(config))
    with pytest.raises(ValueError, match=r"reward_minus_kl_coef: got 0\.1 without reference log-probs"):
        runner.micro_batches(kit.batch(kit.samples(4)))


def test_what_servers_scored_is_taken_as_it_is(kit):
    """The preprocessor has put the KL in; a reference beside the trainer is for the loss then."""

    class Reference:
        def logprobs(self, micro_batches):
            return [torch.full_like(batch.old_logprobs, -9.0) for batch in micro_batches]

    rl = RLConfig(reward_minus_kl_coef=0.1)
    config = kit.config(rl=rl.model_dump())
    backend = PlainBackend(kit.policy(), config, Ranks())
    runner = StepRunner(backend, config, Ranks(), schedule_of(config), reference=Reference())
    scored = finish_step(with_reference(kit.samples(4)), rl)
    (charged,) = runner.micro_batches(kit.batch(scored, plan=[[[0, 1, 2, 3]]]))
    (expected,) = collated(scored, [[0, 1, 2, 3]], True)
    assert torch.equal(charged.advantages, expected.advantages)
    # Without theirs the trainer's own is asked.
    plain = kit.samples(4)
    (charged,) = runner.micro_batches(kit.batch(plain, plan=[[[0, 1, 2, 3]]]))
    own = [
        msgspec.structs.replace(
            s, sample=msgspec.structs.replace(s.sample, ref_logprobs=[-9.0] * s.sample.num_trained_tokens)
        )
        for s in plain
    ]
    (expected,) = collated(finish_step(own, rl), [[0, 1, 2, 3]], True)
    torch.testing.assert_close(charged.advantages, expected.advantages, atol=1e-5, rtol=1e-5)
