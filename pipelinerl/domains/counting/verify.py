"""Grades a count. Called in grader processes; pure."""

from __future__ import annotations

from typing import Any

from pipelinerl.domains.answers import tagged_answer, whole_number
from pipelinerl.domains.counting.problems import gold_answer
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade


@grader
def verify_counting(text: str, problem: dict[str, Any]) -> Grade:
    """1 for the right number in `<answer>` tags."""
    stated = tagged_answer(text)
    if stated is None:
        return Grade(0.0, "no_answer")
    number = whole_number(stated)
    if number is None:
        return Grade(0.0, "unparsable")
    return Grade(1.0, "correct") if number == problem["answer"] else Grade(0.0, "wrong")


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the right output."""
    return verify_counting(gold_answer(problem), problem).score
