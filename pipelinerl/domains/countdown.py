"""Countdown: reach a target from given numbers with + - * /. Procedural, with many right answers."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from pipelinerl.domains.answers import tagged_answer
from pipelinerl.domains.data import draw_problems
from pipelinerl.domains.single_turn import single_turn
from pipelinerl.sandbox.protocol import Grade, grader

MAX_CHARACTERS = 500
_EXPRESSION = re.compile(r"(?:[0-9]{1,6}(?![0-9])|[-+*/() ])+")
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")  # no Python
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
# Multiplication sign, middle dot, division sign and minus sign as they are typeset.
_SAME = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})


class ExpressionError(ValueError):
    """The text is no expression of this kind."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return value and numbers of an expression.

    Raises:
        ExpressionError: it cannot be read, or divides by zero.
    """
    text = _LEADING_ZEROS.sub("", " ".join(text.translate(_SAME).split()))
    if len(text) > MAX_CHARACTERS or not _EXPRESSION.fullmatch(text):
        raise ExpressionError(f"cannot read {text[:20]!r}")
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, MemoryError, RecursionError, ZeroDivisionError) as error:
        raise ExpressionError(str(error)) from error


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _value(node.left, numbers)
        return _OPERATORS[type(node.op)](left, _value(node.right, numbers))
    raise ExpressionError(f"not an expression of + - * /: {ast.unparse(node)[:20]}")


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

    return draw_problems("countdown", dataset_names, (num_train, num_test), seed, draw)


def _combine(numbers: list[int], max_target: int, rng: random.Random) -> tuple[int, str] | None:
    """Join the numbers pairwise in a random order; None when the result is no target."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (left, left_text), (right, right_text) = parts.pop(), parts.pop()
        signs = ["+", "*"] + (["-"] if left > right else []) + (["/"] if left % right == 0 else [])
        sign = rng.choice(signs)
        value = {"+": left + right, "*": left * right, "-": left - right, "/": left // right}[sign]
        parts.append((value, f"({left_text} {sign} {right_text})"))
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


@grader
def verify_countdown(text: str, problem: dict[str, Any]) -> Grade:
    """1 if the expression uses each number once and has the target's value. `= target` after it is allowed."""
    stated = tagged_answer(text)
    if stated is None:
        return Grade(0.0, "no_answer")
    try:
        value, numbers = evaluate(stated.partition("=")[0])
    except ExpressionError:
        return Grade(0.0, "unparsable")
    uses_all = sorted(numbers) == sorted(problem["numbers"])
    details = {"uses_the_numbers": float(uses_all), "hits_the_target": float(value == problem["target"])}
    right = uses_all and value == problem["target"]
    return Grade(float(right), "correct" if right else "wrong", details)


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the known solution."""
    return verify_countdown(gold_answer(problem), problem).score


generate_countdown_rollout = single_turn(verify_countdown, question)
