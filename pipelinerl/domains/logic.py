"""Puzzles: every task family of the package reasoning-gym, graded by its own scorers.

An entry of reasoning-gym may hold objects that no record can carry, so a problem says how to make its entry again:
family, seed, index and settings. A family that draws other entries each time has plain ones, which the problem holds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from pipelinerl.domains.answers import tagged_answer
from pipelinerl.domains.data import check_names, optional
from pipelinerl.domains.single_turn import single_turn
from pipelinerl.errors import DomainError
from pipelinerl.sandbox.protocol import Grade, grader

DEFAULT_FAMILIES = ("leg_counting", "basic_arithmetic", "knights_knaves")
# Far apart, so that no seed of a training entry is one of a test entry.
_TEST_SEED_OFFSET = 1_000_000_000
# Entries by which a family is found to make the same ones each time.
_COMPARED = 3


def load_problems(
    dataset_names: Sequence[str],
    *,
    families: Sequence[str] | Mapping[str, Mapping[str, Any]] = DEFAULT_FAMILIES,
    num_train: int = 500,
    num_test: int = 50,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return `num_train` (`num_test`) problems of each family for the splits `train` and `test`.

    Args:
        families: names, or a mapping name -> settings of that family (as reasoning-gym has them).

    Raises:
        DomainError: the package is not installed, or it does not know a family or a setting.
    """
    check_names("logic", dataset_names)
    settings = {name: {} for name in families} if not isinstance(families, Mapping) else families
    problems: list[dict[str, Any]] = []
    for split in dataset_names:
        size, first = (num_train, seed) if split == "train" else (num_test, seed + _TEST_SEED_OFFSET)
        for family, options in settings.items():
            recipe = {"family": family, "seed": first, "size": size, "settings": dict(options or {})}
            problems += _problems_of(recipe, split)
    return problems


def _problems_of(recipe: dict[str, Any], split: str) -> list[dict[str, Any]]:
    data = make_dataset(recipe)
    repeats = _repeats(data, make_dataset(recipe), min(recipe["size"], _COMPARED))
    problems = []
    for index in range(recipe["size"]):
        entry = data[index]
        problems.append(
            {
                **({} if repeats else {"entry": dict(entry)}),
                "id": f"logic-{recipe['family']}-{recipe['seed']}-{index}",
                "dataset": recipe["family"] if split == "train" else f"{recipe['family']}_test",
                "index": index,
                "question": str(entry["question"]),
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                **recipe,
            }
        )
    return problems


def _repeats(data: Any, again: Any, count: int) -> bool:
    """Whether two data sets of one recipe agree; some families draw from a source of chance of their own."""
    entries = ((data[index], again[index]) for index in range(count))
    return all(
        (first["question"], str(first["answer"])) == (second["question"], str(second["answer"]))
        for first, second in entries
    )


def make_dataset(recipe: Mapping[str, Any]) -> Any:
    """Return the reasoning-gym data set of a recipe (or of a problem, which holds its recipe).

    Raises:
        DomainError: the family or a setting is unknown.
    """
    reasoning_gym = optional("reasoning_gym", "logic", "reasoning-gym")
    known = reasoning_gym.factory.DATASETS
    family = recipe["family"]
    if family not in known:
        near = difflib.get_close_matches(family, sorted(known), n=3)
        raise DomainError(
            f"logic: reasoning-gym has no family {family!r}, expected one of its {len(known)}. "
            f"Near ones: {', '.join(near) or 'none'}. Change dataset_loader_params.families."
        )
    try:
        return reasoning_gym.create_dataset(family, seed=recipe["seed"], size=recipe["size"], **recipe["settings"])
    except (TypeError, ValueError, AssertionError) as error:
        raise DomainError(f"logic: family {family!r} does not take {recipe['settings']}: {error}") from error


def gold_answer(problem: dict[str, Any]) -> str | None:
    """Return a right output; some families have many and name none."""
    return None if problem["answer"] is None else f"<answer>{problem['answer']}</answer>"


MAX_CHARACTERS = 20_000
# Their scorers call `eval` on answers of another form than the expected one.
LITERAL_FAMILIES = frozenset({"string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens"})
# Their scorers give the answer to sympy's parser, which evaluates it.
FORMULA_FAMILIES = frozenset(
    {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
)
_FORMULA = re.compile(r"[0-9A-Za-z+\-*/^(),.= \n]*")
_NAMES = re.compile(r"[A-Za-z]+")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "Abs", "abs", "pi"})
_DOT_AFTER_NAME = re.compile(r"[A-Za-z)]\s*\.|\.\s*[A-Za-z(]")


def is_harmless(family: str, answer: str) -> bool:
    """Whether this answer may be shown to the family's scorer."""
    if len(answer) > MAX_CHARACTERS or "\0" in answer:
        return False
    if family in LITERAL_FAMILIES:
        return not any(sign in answer for sign in "([{") or _is_literal(answer)
    if family in FORMULA_FAMILIES:
        return _is_formula(answer)
    return True


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_formula(answer: str) -> bool:
    if not _FORMULA.fullmatch(answer) or _DOT_AFTER_NAME.search(answer):
        return False
    return all(len(name) == 1 or name in _FUNCTIONS for name in _NAMES.findall(answer))


_KEPT_DATASETS = 64
_NEARLY = 1 - 1e-6


@functools.lru_cache(maxsize=_KEPT_DATASETS)
def _dataset(recipe: bytes) -> Any:
    return make_dataset(msgspec.json.decode(recipe))


@grader(preload="reasoning_gym")
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


SYSTEM_PROMPT = "Think about the problem, then output the final answer as <answer>your answer</answer>."


generate_logic_rollout = single_turn(verify_logic, itemgetter("question"), SYSTEM_PROMPT)
