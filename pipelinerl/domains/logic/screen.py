"""Keeps code away from the scorers of reasoning-gym that evaluate the text of an answer. Pure.

Called by the grader before the scorer. Those scorers want a list, or a formula; what is neither is not shown to them.
"""

from __future__ import annotations

import ast
import re

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
