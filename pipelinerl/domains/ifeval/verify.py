"""Grades how many constraints an answer meets. Called in grader processes; pure."""

from __future__ import annotations

from typing import Any

from pipelinerl.domains.answers import after_thinking
from pipelinerl.domains.ifeval.constraints import follows
from pipelinerl.domains.ifeval.problems import gold_answer
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade


@grader
def verify_ifeval(text: str, problem: dict[str, Any], partial: bool = False) -> Grade:
    """1 if all constraints are met; with `partial`, else the share of those that are."""
    answer = after_thinking(text)
    if not answer.strip():
        return Grade(0.0, "no_answer")
    met = [follows(answer, each["kind"], each) for each in problem["constraints"]]
    share = sum(met) / len(met)
    details = {"constraints_met": share}
    if all(met):
        return Grade(1.0, "correct", details)
    return Grade(share if partial else 0.0, "wrong", details)


def validate(problem: dict[str, Any]) -> float:
    """Return the score of a text that is made to meet all constraints."""
    return verify_ifeval(gold_answer(problem), problem).score
