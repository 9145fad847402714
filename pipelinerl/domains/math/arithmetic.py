"""Small sums: problems of mathematics that need no data. Pure; called by `load_problems`."""

from __future__ import annotations

import random
from typing import Any

from pipelinerl.domains.splits import draw_problems

_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def draw_sums(names: list[str], sizes: dict[str, int], max_operand: int, seed: int) -> list[dict[str, Any]]:
    """Return sums of two or three numbers of 0..max_operand with + - *."""

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        first, second, third = (rng.randint(0, max_operand) for _ in range(3))
        operator = rng.choice("+-*")
        value = {"+": first + second, "-": first - second, "*": first * second}[operator]
        words = f"{first} {_WORDS[operator]} {second}"
        has_third = rng.random() < 0.5
        if has_third:
            words, value = f"{words}, and then plus {third}", value + third
        difficulty = 0.5 * has_third + 0.5 * (operator == "*")
        problem = {"task": f"What is {words}?", "answer": str(value), "difficulty": difficulty}
        return words, problem

    return draw_problems("math", names, sizes, seed, draw)
