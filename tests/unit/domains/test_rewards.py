"""Reward components by hand, and that every file of conf/rewards composes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.task import RewardsConfig
from pipelinerl.domains.rewards import JudgedAnswer, compute_reward, find_component
from pipelinerl.errors import ConfigError
from pipelinerl.sandbox.protocol import Grade

RIGHT, WRONG = Grade(1.0, "correct"), Grade(0.0, "wrong")
CONF = Path(__file__).parents[3] / "conf" / "rewards"


def judged(
    grade: Grade = RIGHT, tokens: int = 10, finished: bool = True, difficulty: float | None = None
) -> JudgedAnswer:
    return JudgedAnswer(grade, finished, tokens, max_tokens=100, difficulty=difficulty)


def test_success_alone_is_1_or_0() -> None:
    assert compute_reward(judged(), RewardsConfig()) == (1.0, {"reward_outcome": 1.0})
    assert compute_reward(judged(WRONG), RewardsConfig()) == (0.0, {"reward_outcome": 0.0})
    assert compute_reward(judged(finished=False), RewardsConfig())[0] == 0.0


def test_partial_scores_lie_between_wrong_and_right() -> None:
    config = RewardsConfig(wrong_answer_finished=-0.5)
    assert compute_reward(judged(Grade(0.5, "wrong")), config)[0] == pytest.approx(0.25)


def test_soft_length_falls_in_a_line_over_the_buffer() -> None:
    config = RewardsConfig(components={"outcome": 1.0, "soft_length": 2.0}, buffer_tokens=20)
    assert [compute_reward(judged(tokens=n), config)[1]["reward_soft_length"] for n in (80, 90, 100)] == [
        0.0,
        -1.0,
        -2.0,
    ]
    assert compute_reward(judged(tokens=90), config)[0] == 0.0


def test_a_buffer_alone_turns_the_length_penalty_on() -> None:
    reward, parts = compute_reward(judged(tokens=95), RewardsConfig(buffer_tokens=10))
    assert reward == 0.5 and parts == {"reward_outcome": 1.0, "reward_soft_length": -0.5}


def test_difficulty_length_gives_hard_problems_room() -> None:
    config = RewardsConfig(components={"difficulty_length": 1.0}, easy_tokens=20)
    # Budgets: 20 for difficulty 0, 60 for 0.5, 100 for 1.
    assert compute_reward(judged(tokens=60, difficulty=0.0), config)[0] == pytest.approx(-0.5)
    assert compute_reward(judged(tokens=60, difficulty=0.5), config)[0] == 0.0
    assert compute_reward(judged(tokens=80, difficulty=0.5), config)[0] == pytest.approx(-0.5)
    assert compute_reward(judged(tokens=100, difficulty=1.0), config)[0] == 0.0
    assert compute_reward(judged(WRONG, tokens=100, difficulty=0.0), config)[0] == 0.0


def test_format_and_discount() -> None:
    config = RewardsConfig(components={"success": 1.0, "format": 0.5})
    assert compute_reward(judged(tokens=2), config, discount_factor=0.9)[0] == pytest.approx(1.5 * 0.81)
    assert compute_reward(judged(Grade(0.0, "unparsable")), config)[0] == 0.0


def test_components_by_path_and_unknown_ones() -> None:
    assert find_component("pipelinerl.domains.rewards.success").__name__ == "success"
    with pytest.raises(ConfigError, match="Did you mean soft_length"):
        find_component("soft_lenght")
    with pytest.raises(ConfigError, match="no_such_module"):
        find_component("no_such_module.f")


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_reward_file_composes(name: str) -> None:
    config = compose(["--config-name", "counting", f"rewards={name}", "output_dir=x"]).config
    assert config is not None
    for component in config.rewards.components:
        find_component(component)
