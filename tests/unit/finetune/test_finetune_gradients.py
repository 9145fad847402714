"""The gradient of a step does not depend on packing, micro-batches, or attention; masked batches give exactly 0."""

import pytest
import torch

from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner


def runner_of(kit, policy=None, ranks=None, on_micro_batch=lambda: None, **config_changes):
    config = kit.config(**config_changes)
    backend = PlainBackend(policy or kit.policy(), config, Ranks())
    return StepRunner(backend, config, ranks or Ranks(), on_micro_batch=on_micro_batch)


def gradients(kit, batch, family="qwen2", attention=None, policy=None, ranks=None, **config_changes):
    policy = policy or kit.policy(family, **({"attention": attention} if attention else {}))
    runner_of(kit, policy, ranks, **config_changes).accumulate(batch)
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def assert_equal(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name in left:
        scale = max(1.0, float(left[name].abs().max()))
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance * scale, msg=name)


@pytest.fixture
def samples(kit):
    return kit.samples(64, masked_every=9)


@pytest.fixture
def one_by_one(kit, samples):
    """Reference: every sample alone, padded, with the attention of the library."""
    batch = kit.batch(samples, plan=[[[k] for k in range(64)]])
    return gradients(kit, batch, attention="eager", seq_packing=False)


@pytest.mark.parametrize("attention", ["pipelinerl_segments", "sdpa"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([[list(range(64))]], id="1x64"),
        pytest.param([[list(range(k, k + 16)) for k in range(0, 64, 16)]], id="4x16"),
        pytest.param([[list(range(3)), list(range(3, 50)), [50], list(range(51, 64))]], id="uneven"),
        pytest.param(None, id="token budget"),
    ],
)
def test_m2_m3_the_gradient_is_the_same_however_samples_are_split(kit, samples, one_by_one, attention, packed, plan):
    batch = kit.batch(samples, plan=plan)
    assert_equal(one_by_one, gradients(kit, batch, attention=attention, seq_packing=packed))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_gradient_checkpointing_changes_nothing(kit, samples, family):
    batch = kit.batch(samples)
    plain = gradients(kit, batch, family)
    policy = kit.policy(family)
    policy.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(plain, gradients(kit, batch, policy=policy), 1e-6)


def test_the_loss_is_divided_by_the_samples_of_the_step(kit):
    """Doubling a batch by repeating its samples leaves the gradient as it is (mean over samples)."""
    samples = kit.samples(8)
    once = gradients(kit, kit.batch(samples))
    twice = gradients(kit, kit.batch(samples + samples))
    assert_equal(once, twice)


def test_a_value_head_that_the_loss_does_not_use_has_a_gradient_of_zero(kit):
    """Ranks wait in their collectives for a gradient of every parameter."""
    found = gradients(kit, kit.batch(kit.samples(8)), policy=kit.policy(with_values=True))
    for name in ("value_head.weight", "value_head.bias"):
        assert found[name] is not None and not found[name].any()


def test_m2_a_fully_masked_batch_gives_exactly_zero(kit):
    for gradient in gradients(kit, kit.batch(kit.samples(8, masked_every=1))).values():
        assert gradient is not None
        assert not gradient.any()


def test_m2_a_sentinel_adds_exactly_nothing(kit):
    """A plan for two ranks gives this rank one micro-batch and the other two: rank 0 is filled up with a sentinel."""
    samples = kit.samples(9)
    plan = [[[0, 1, 2]], [[3, 4, 5], [6, 7, 8]]]
    alone = gradients(kit, kit.batch(samples, plan=[plan[0]]))
    ranks = Ranks(0, 2)
    assert len(runner_of(kit, ranks=ranks).micro_batches(kit.batch(samples, plan=plan))) == 2
    with_sentinel = gradients(kit, kit.batch(samples, plan=plan), ranks=ranks)
    for name, gradient in alone.items():
        assert torch.equal(gradient, with_sentinel[name]), name


def test_a_plan_for_another_number_of_ranks_is_made_again(kit):
    samples = kit.samples(16)
    batch = kit.batch(samples, plan=[[[k] for k in range(8)], [[k] for k in range(8, 16)]])
    runner = runner_of(kit)
    trained = sorted(index for micro_batch in runner.micro_batches(batch) for index in micro_batch.indices)
    assert trained == list(range(16))


@pytest.mark.parametrize("room", [None, 1.0, 0.125])
def test_rows_that_are_too_long_without_shared_prefixes_are_made_again(kit, room):
    """The plan is for the attention that keeps least of shared tokens; the policy may keep more, or share none."""
    attention = "pipelinerl_varlen" if room == 0.125 else "pipelinerl_segments"
    policy = kit.policy(attention=attention, shares_prefixes=room is not None)
    samples = kit.samples(12)
    longest, whole = max(len(s.input_ids) for s in samples), sum(len(s.input_ids) for s in samples)
    plan = [[[*range(6)], [*range(6, 12)]], [[]]]
    for seq_length, is_kept in ((longest + 1, room == 0.125), (whole, True)):
        config = kit.config(seq_length=seq_length)
        backend, rows = PlainBackend(policy, config, Ranks()), []
        for rank in range(2):
            own = StepRunner(backend, config, Ranks(rank, 2)).micro_batches(kit.batch(samples, plan=plan))
            rows += [list(micro_batch.indices) for micro_batch in own if micro_batch.indices]
        assert sorted(index for row in rows for index in row) == list(range(12))
        assert (sorted(rows) == [[*range(6)], [*range(6, 12)]]) == is_kept
        if not is_kept:
            assert max(sum(len(samples[index].input_ids) for index in row) for row in rows) <= seq_length


def test_each_micro_batch_is_a_sign_of_life(kit):
    beats = []
    runner = runner_of(kit, on_micro_batch=lambda: beats.append(1))
    runner.accumulate(kit.batch(kit.samples(3), plan=[[[0], [1], [2]]]))
    assert len(beats) == 3
