"""Grades with the scorer of the problem's own family. Called in grader processes.

The scorers belong to another package and may do anything with the text of an answer: see `screen`, and the
confinement of grader processes.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import reasoning_gym  # noqa: F401 - loaded with this module, not within the deadline of the first answer

from pipelinerl.domains.answers import tagged_answer
from pipelinerl.domains.logic.problems import gold_answer, make_dataset
from pipelinerl.domains.logic.screen import is_harmless
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade

_KEPT_DATASETS = 64
_NEARLY = 1 - 1e-6


@functools.lru_cache(maxsize=_KEPT_DATASETS)
def _dataset(recipe: bytes) -> Any:
    return make_dataset(msgspec.json.decode(recipe))


@grader
def verify_logic(text: str, problem: dict[str, Any]) -> Grade:
    """The family's own score of what stands in `<answer>` tags, 0 to 1; families give credit for near misses."""
    answer = tagged_answer(text)
    if answer is None:
        return Grade(0.0, "no_answer")
    if not is_harmless(problem["family"], answer):
        return Grade(0.0, "unparsable")
    recipe = {key: problem[key] for key in ("family", "seed", "size", "settings")}
    data = _dataset(msgspec.json.encode(recipe))
    entry = problem["entry"] if "entry" in problem else data[problem["index"]]
    try:
        score = float(data.score_answer(answer, entry))
    except Exception:
        # Some scorers raise on what they cannot read. Is it the answer, or the scorer itself?
        if not _scorer_works(data, entry):
            raise
        return Grade(0.0, "unparsable")
    return Grade(score, "correct" if score >= _NEARLY else "wrong")


def _scorer_works(data: Any, entry: Any) -> bool:
    """Whether the scorer gives a right answer its due, or no answer a score; raises what the scorer raises."""
    if entry["answer"] is None:
        return float(data.score_answer(None, entry)) < _NEARLY
    return float(data.score_answer(str(entry["answer"]), entry)) >= _NEARLY


def validate(problem: dict[str, Any]) -> float | None:
    """Return the score of the family's own answer; None where it names none."""
    gold = gold_answer(problem)
    return None if gold is None else verify_logic(gold, problem).score
