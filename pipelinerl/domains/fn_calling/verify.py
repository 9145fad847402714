"""Grades function calls against the expected ones. Called in grader processes; pure, never raises."""

from __future__ import annotations

from typing import Any

from pipelinerl.domains.answers import after_thinking
from pipelinerl.domains.fn_calling.parser import FunctionCall, parse_calls
from pipelinerl.domains.fn_calling.problems import gold_answer
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade


@grader
def verify_fn_calling(text: str, problem: dict[str, Any], partial: bool = False) -> Grade:
    """1 if exactly the expected calls are made, in any order; with `partial`, else the share of right calls."""
    parsed = parse_calls(after_thinking(text))
    if not parsed.calls:
        return Grade(0.0, "unparsable" if parsed.num_damaged else "no_answer")
    missing = [FunctionCall(call["name"], call["arguments"]) for call in problem["expected"]]
    num_expected = len(missing)
    for call in parsed.calls:
        match = next((index for index, wanted in enumerate(missing) if _same_call(call, wanted)), None)
        if match is not None:
            del missing[match]
    found = num_expected - len(missing)
    extra = len(parsed.calls) - found + parsed.num_damaged
    details = {"calls_right": found / max(num_expected, 1), "calls_extra": float(extra)}
    if not missing and not extra:
        return Grade(1.0, "correct", details)
    return Grade(found / max(num_expected, len(parsed.calls)) if partial else 0.0, "wrong", details)


def _same_call(left: FunctionCall, right: FunctionCall) -> bool:
    return left.name == right.name and same_value(left.arguments, right.arguments)


def same_value(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0 but not true, and space around a text does not count."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, str) and isinstance(right, str):
        return left.strip() == right.strip()
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(value, right[key]) for key, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same_value(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the expected calls."""
    return verify_fn_calling(gold_answer(problem), problem).score
