"""Grades an expression against numbers and target. Called in grader processes; pure."""

from __future__ import annotations

from typing import Any

from pipelinerl.domains.answers import tagged_answer
from pipelinerl.domains.countdown.expression import ExpressionError, evaluate
from pipelinerl.domains.countdown.problems import gold_answer
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade


@grader
def verify_countdown(text: str, problem: dict[str, Any]) -> Grade:
    """1 if the expression uses each number once and has the target's value. `= target` behind it is allowed."""
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
