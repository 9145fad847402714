"""Grades a final answer with math-verify. Called in grader processes, whose deadline stands in for its own.

Only its LaTeX parser reads the model's text: the other one gives text to sympy, which evaluates it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from pipelinerl.domains.answers import boxed_answer, tagged_answer
from pipelinerl.domains.math.problems import gold_answer
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade

MAX_ANSWER_CHARACTERS = 2000
_SPACE = re.compile(r"\s+|\\[,;!:]|\\(?:left|right|displaystyle)(?![a-zA-Z])")
_LATEX = (LatexExtractionConfig(),)


@grader
def verify_math(text: str, problem: dict[str, Any]) -> Grade:
    """1 if the last `\\boxed{}` (or `<answer>`) is mathematically equal to the problem's answer."""
    stated = boxed_answer(text)
    if stated is None:
        stated = tagged_answer(text)
    if not stated:
        return Grade(0.0, "no_answer")
    gold = str(problem["answer"])
    if plain(stated) == plain(gold):
        return Grade(1.0, "correct")
    if len(stated) > MAX_ANSWER_CHARACTERS or "\0" in stated:
        return Grade(0.0, "unparsable")
    wanted = parsed(gold)
    found = parsed(stated)
    if not found:
        return Grade(0.0, "unparsable")
    right = verify(wanted, found, timeout_seconds=None)
    return Grade(1.0, "correct") if right else Grade(0.0, "wrong")


def plain(text: str) -> str:
    """Return LaTeX without what does not change its meaning: space, delimiters, commas in numbers."""
    text = _SPACE.sub("", text[: 2 * MAX_ANSWER_CHARACTERS].strip().strip("$"))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def parsed(answer: str) -> list[Any]:
    """Return what math-verify makes of an answer; empty if it cannot read it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadline is off
    found: list[Any] = parse(f"\\boxed{{{answer}}}", extraction_config=_LATEX, parsing_timeout=None)
    return found


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the reference answer."""
    return verify_math(gold_answer(problem), problem).score
