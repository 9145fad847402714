"""Learning-rate factors by hand, and the parameter groups."""

import pytest

from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.optimizer import Schedule, parameter_groups
from pipelinerl.finetune.ranks import Ranks


def test_linear_with_warmup_by_hand():
    schedule = Schedule("linear", warmup_steps=2, total_steps=6)
    assert [schedule.factor(step) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_by_hand():
    schedule = Schedule("cosine", warmup_steps=0, total_steps=4)
    # (1 + cos(pi * k / 4)) / 2 for k = 0..3
    assert [schedule.factor(step) for step in range(1, 5)] == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


def test_constant_schedules():
    assert Schedule("constant", 5, 10).factor(1) == 1.0
    warm = Schedule("constant_with_warmup", 2, 10)
    assert [warm.factor(step) for step in (1, 2, 3, 99)] == [0.5, 1.0, 1.0, 1.0]


def test_a_step_beyond_the_end_has_rate_zero():
    assert Schedule("linear", 0, 4).factor(9) == 0.0


def test_with_passes_the_length_is_estimated_by_hand():
    """Two passes wanted. Step 3 ends half a pass: 12 steps in all; 1 - 2 / 12. Before a pass nothing is known."""
    schedule = Schedule("linear", 0, 100, max_epochs=2)
    assert schedule.total_at(3, 0.5) == 12 and schedule.factor(3, 0.5) == 1 - 2 / 12
    assert schedule.total_at(3, 0.0) == 100 and schedule.total_at(3, 0.01) == 100
    # The last step still learns something, and one behind the passes (a round is not cut off) is the last one.
    assert schedule.factor(10, 2.0) == 1 - 9 / 10 and schedule.factor(11, 2.4) == pytest.approx(1 - 10 / 11)
    assert Schedule("linear", 0, 100).factor(3, 0.5) == 1 - 2 / 100


@pytest.mark.parametrize("samples_a_rollout", [1, 3])
def test_the_rate_falls_to_the_end_of_the_passes(samples_a_rollout):
    """One pass takes 20 steps with one sample a rollout and 60 with three; the rate is the same at the same place."""
    schedule, steps = Schedule("cosine", 0, 1000, max_epochs=1), 20 * samples_a_rollout
    rates = [schedule.factor(step, step / steps) for step in range(1, steps + 1)]
    assert rates[0] == 1.0 and rates[-1] < 0.01 and rates == sorted(rates, reverse=True)
    assert rates[steps // 2] == pytest.approx(0.5, abs=0.08)


def test_groups(kit):
    policy = kit.policy(with_values=True)
    config = kit.config(
        weight_decay=0.1,
        learning_rate=1e-3,
        adam_beta2=0.9,
        rl={"advantage_estimator": "gae", "critic_learning_rate": 5e-3},
    )
    groups = parameter_groups(policy.named_parameters(), config)
    assert [(g["base_lr"], g["weight_decay"]) for g in groups] == [(1e-3, 0.1), (1e-3, 0.0), (5e-3, 0.0)]
    assert sum(len(g["params"]) for g in groups) == len(list(policy.parameters()))
    assert len(groups[2]["params"]) == 2
    backend = PlainBackend(policy, config, Ranks())
    backend.set_learning_rate(0.5)
    assert [(g["lr"], g["betas"]) for g in backend.optimizer.param_groups] == [
        *((5e-4, (0.9, 0.9)), (5e-4, (0.9, 0.9)), (2.5e-3, (0.9, 0.9)))
    ]
