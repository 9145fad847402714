"""Problems of countdown, each made from a solution, so that each has one. Pure; called through `dataset_loader`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pipelinerl.domains.splits import draw_problems


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 2000,
    num_test: int = 200,
    min_numbers: int = 3,
    max_numbers: int = 4,
    max_number: int = 99,
    max_target: int = 999,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return problems of the splits `train` and `test` with `min_numbers` to `max_numbers` numbers of 1..max_number."""

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        count = rng.randint(min_numbers, max_numbers)
        while True:
            numbers = [rng.randint(1, max_number) for _ in range(count)]
            made = _combine(numbers, max_target, rng)
            if made is not None:
                break
        target, solution = made
        shown = sorted(numbers)
        difficulty = (count - min_numbers) / max(max_numbers - min_numbers, 1)
        problem = {"numbers": shown, "target": target, "solution": solution, "difficulty": difficulty}
        return f"{shown}/{target}", problem

    return draw_problems("countdown", dataset_names, {"train": num_train, "test": num_test}, seed, draw)


def _combine(numbers: list[int], max_target: int, rng: random.Random) -> tuple[int, str] | None:
    """Join the numbers pairwise in a random order; None when the result is no target."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (left, left_text), (right, right_text) = parts.pop(), parts.pop()
        operators = ["+", "*"] + (["-"] if left > right else []) + (["/"] if left % right == 0 else [])
        operator = rng.choice(operators)
        value = {"+": left + right, "*": left * right, "-": left - right, "/": left // right}[operator]
        parts.append((value, f"({left_text} {operator} {right_text})"))
    value, text = parts[0]
    return (value, text[1:-1]) if 1 <= value <= max_target else None


def question(problem: dict[str, Any]) -> str:
    """Return the words of a problem."""
    numbers = ", ".join(str(number) for number in problem["numbers"])
    return (
        f"Use each of the numbers {numbers} exactly once, with + - * / and brackets, to make {problem['target']}. "
        "Output the expression as <answer>expression</answer>."
    )


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    return f"<answer>{problem['solution']}</answer>"
