"""The entropy bonus that follows a target, worked out by hand."""

from __future__ import annotations

import math

import pytest

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.rl.loss import EntropyControl

CONFIG = RLConfig(target_entropy=0.5, entropy_bonus=0.01, entropy_bonus_step=0.004)


def follow(entropies: list[float], config: RLConfig = CONFIG) -> list[float]:
    """The bonus of the first step, and of the one behind each entropy."""
    control = EntropyControl.at(config, None)
    assert control is not None
    bonuses = [control.bonus(config)]
    for entropy in entropies:
        control = control.after(config, {"rl/entropy": entropy, "rl/entropy_estimate": 1.0})
        bonuses.append(control.bonus(config))
    return bonuses


def test_it_grows_below_the_target_and_is_not_paid_above():
    # c: 0.010, 0.014, 0.018 | above: 0.014, 0.010, not paid | below again: 0.014.
    assert follow([0.4, 0.3, 0.6, 0.7, 0.2]) == pytest.approx([0.010, 0.014, 0.018, 0.0, 0.0, 0.014])


def test_at_the_target_nothing_changes():
    assert follow([0.5, 0.5]) == pytest.approx([0.01, 0.01, 0.01])


def test_the_coefficient_stays_above_zero():
    # c: 0.010, 0.006, 0.002, 0, 0 | below: 0.004. Without the bound it would need two more steps.
    assert follow([0.9, 0.9, 0.9, 0.9, 0.1])[-1] == pytest.approx(0.004)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"rl/entropy": math.nan, "rl/entropy_estimate": 1.0},
        {"rl/entropy": math.inf, "rl/entropy_estimate": 1.0},
        # Nothing was trained.
        {"rl/entropy": 0.0},
    ],
)
def test_a_step_without_an_entropy_changes_nothing(metrics: dict[str, float]):
    control = EntropyControl(coefficient=0.02, entropy=0.7)
    assert control.after(CONFIG, metrics) == control


def test_it_goes_on_where_it_was_saved_and_ends_with_the_target():
    saved = EntropyControl(coefficient=0.3, entropy=0.1)
    assert EntropyControl.at(CONFIG, saved) == saved
    assert EntropyControl.at(RLConfig(), saved) is None
    assert EntropyControl.at(RLConfig(entropy_bonus=0.1), None) is None
