"""A right output of the guessing game, and the check that the game reads it as one. Pure; called by `check-domain`."""

from __future__ import annotations

from typing import Any

from pipelinerl.domains.guessing.prompts import format_answer, parse_answer


def gold_answer(problem: dict[str, Any]) -> str:
    """Return the output that wins at once."""
    return format_answer(int(problem["answer"]))


def validate(problem: dict[str, Any]) -> float:
    """Return 1 if the game reads the winning output as the answer, which lies in the problem's range."""
    answer = int(problem["answer"])
    in_range = problem.get("low", 1) <= answer <= problem.get("high", answer)
    return float(in_range and parse_answer(gold_answer(problem)) == answer)
