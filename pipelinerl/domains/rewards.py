"""From a grade to a reward: named components, weighted and added up, and logged one by one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipelinerl.config.task import RewardsConfig
from pipelinerl.errors import ConfigError
from pipelinerl.sandbox.protocol import Grade


@dataclass(frozen=True)
class JudgedAnswer:
    """What a component may look at.

    Args:
        grade: of the grader.
        finished: the model ended the answer itself.
        output_tokens: length of the answer.
        max_tokens: limit of that length.
        difficulty: 0 (easy) to 1 (hard), from the problem; None: unknown.
    """

    grade: Grade
    finished: bool
    output_tokens: int
    max_tokens: int
    difficulty: float | None = None


Component = Callable[[JudgedAnswer, RewardsConfig], float]


def outcome(answer: JudgedAnswer, config: RewardsConfig) -> float:
    """The number of the table for this kind of answer. A score between 0 and 1 lies between wrong and correct."""
    ending = "finished" if answer.finished else "not_finished"
    kind = {"correct": "correct_answer", "wrong": "wrong_answer"}.get(answer.grade.status, answer.grade.status)
    value = float(getattr(config, f"{kind}_{ending}"))
    if answer.grade.status == "wrong" and 0 < answer.grade.score < 1:
        best = float(getattr(config, f"correct_answer_{ending}"))
        value += answer.grade.score * (best - value)
    return value


def success(answer: JudgedAnswer, config: RewardsConfig) -> float:
    """The score itself."""
    return answer.grade.score


def answer_format(answer: JudgedAnswer, config: RewardsConfig) -> float:
    """1 if an answer was given that can be read, and the model ended it; else 0."""
    return float(answer.finished and answer.grade.status in ("correct", "wrong"))


def soft_length(answer: JudgedAnswer, config: RewardsConfig) -> float:
    """0 up to `buffer_tokens` before the limit, then falling in a line to -1 at the limit (DAPO, equation 13)."""
    if config.buffer_tokens == 0:
        return 0.0
    buffer_tokens = min(config.buffer_tokens, answer.max_tokens)
    over = answer.output_tokens - (answer.max_tokens - buffer_tokens)
    return -min(max(over, 0) / buffer_tokens, 1.0)


def difficulty_length(answer: JudgedAnswer, config: RewardsConfig) -> float:
    """For a right answer: 0 within the problem's budget, then falling in a line to -1 at the limit.

    The budget grows with the difficulty from `easy_tokens` to the limit, so hard problems may be thought about. Wrong
    answers cost nothing here: they should get longer rather than shorter.
    """
    if answer.grade.status != "correct":
        return 0.0
    easy = min(config.easy_tokens, answer.max_tokens)
    difficulty = min(max(0.5 if answer.difficulty is None else answer.difficulty, 0.0), 1.0)
    budget = easy + difficulty * (answer.max_tokens - easy)
    room = answer.max_tokens - budget
    return -min(max(answer.output_tokens - budget, 0) / room, 1.0) if room > 0 else 0.0


COMPONENTS: Mapping[str, Component] = MappingProxyType(
    {
        "outcome": outcome,
        "success": success,
        "format": answer_format,
        "soft_length": soft_length,
        "difficulty_length": difficulty_length,
    }
)


def find_component(name: str) -> Component:
    """Return a component by its name, or a function of the user's by its dotted path.

    Raises:
        ConfigError: there is none.
    """
    if name in COMPONENTS:
        return COMPONENTS[name]
    module_name, _, function = name.rpartition(".")
    near = difflib.get_close_matches(name, list(COMPONENTS), n=1)
    next_step = f"Did you mean {near[0]}?" if near else "Or give the dotted path of def f(answer, config) -> float."
    try:
        found: Any = getattr(importlib.import_module(module_name), function, None) if module_name else None
    except ImportError as error:
        found, next_step = None, f"Importing {module_name} failed: {error}."
    if not callable(found):
        raise ConfigError("rewards.components", name, f"one of {', '.join(COMPONENTS)}", next_step)
    component: Component = found
    return component


def compute_reward(
    answer: JudgedAnswer, config: RewardsConfig, discount_factor: float = 1.0
) -> tuple[float, dict[str, float]]:
    """Return the reward and its parts.

    The parts are `reward_<component>`, each with its weight; their sum, times `discount_factor` to the power of the
    output tokens, is the reward. With `buffer_tokens` above 0 the component `soft_length` takes part with weight 1
    if it has no weight of its own.
    """
    weights = dict(config.components)
    if config.buffer_tokens > 0:
        weights.setdefault("soft_length", 1.0)
    parts = {
        f"reward_{name.rpartition('.')[2]}": weight * find_component(name)(answer, config)
        for name, weight in weights.items()
    }
    return sum(parts.values()) * discount_factor**answer.output_tokens, parts
