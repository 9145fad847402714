"""Environments of the package verifiers for tests. Found in grader processes through PYTHONPATH."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset

ROWS = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(10)]


def equals(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


async def is_short(completion: Any, **kwargs: Any) -> float:
    return float(len(completion[-1]["content"]) < 3)


def raises_on_seven(completion: Any, answer: str) -> float:
    if answer == "7":
        raise KeyError("seven")
    return 0.0


def spins_on_eight(completion: Any, answer: str) -> float:
    while answer == "8":
        pass
    return 0.0


def whole_group(completions: Any, answers: Any) -> list[float]:
    return [0.0 for _ in answers]


def load_environment(with_eval: bool = False, bad: bool = False, group: bool = False) -> verifiers.Environment:
    functions = [equals, is_short, raises_on_seven, spins_on_eight] if bad else [equals, is_short]
    functions = [whole_group] if group else functions
    weights = [1.0, 0.0, 1.0, 1.0][: len(functions)]
    held_out = Dataset.from_list(ROWS[:2]) if with_eval else None
    rubric = verifiers.Rubric(funcs=functions, weights=weights)
    return verifiers.SingleTurnEnv(
        dataset=Dataset.from_list(ROWS), eval_dataset=held_out, rubric=rubric, system_prompt="Add."
    )


class TwoTries(verifiers.MultiTurnEnv):
    """Says whether an answer is right, and lets the model try once more."""

    def __init__(self) -> None:
        super().__init__(
            dataset=Dataset.from_list(ROWS), rubric=verifiers.Rubric(funcs=[equals, num_tries]), max_turns=2
        )

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["tries"] = state.get("tries", 0) + 1
        return [{"role": "user", "content": "wrong"}]


def num_tries(state: Any) -> float:
    return float(len(state["trajectory"]) + state["tries"]) / 100


def not_an_environment() -> int:
    return 7
