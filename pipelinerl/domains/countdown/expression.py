"""Reads and computes an expression of whole numbers, + - * / and brackets, without evaluating text as code. Pure.

Called by the grader. Bounded: at most 100 tokens of at most 6 digits, and no powers, so no number can get large.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_TOKENS = 100
MAX_CHARACTERS = 1000
_TOKEN = re.compile(r"\s*(?:([0-9]{1,6})(?![0-9])|([-+*/()]))", re.ASCII)
# Multiplication sign, middle dot, division sign and minus sign as they are typeset.
_SAME = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"})


class ExpressionError(ValueError):
    """The text is no expression of this kind."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return value and numbers of an expression.

    Raises:
        ExpressionError: it cannot be read, or divides by zero.
    """
    return _Reader(_tokens(text)).read()


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters, at most {MAX_CHARACTERS}")
    text = text.translate(_SAME).strip()
    tokens: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or len(tokens) == MAX_TOKENS:
            raise ExpressionError(f"cannot read {text[position : position + 20]!r}")
        tokens.append(found.group(1) or found.group(2))
        position = found.end()
    return tokens


class _Reader:
    """Recursive descent; the depth is bounded by the number of tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._numbers: list[int] = []

    def read(self) -> tuple[Fraction, list[int]]:
        value = self._sum()
        if self._next != len(self._tokens):
            raise ExpressionError("there is more behind the expression")
        return value, self._numbers

    def _take(self, *wanted: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next] in wanted:
            self._next += 1
            return self._tokens[self._next - 1]
        return None

    def _sum(self) -> Fraction:
        value = self._product()
        while operator := self._take("+", "-"):
            right = self._product()
            value = value + right if operator == "+" else value - right
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while operator := self._take("*", "/"):
            right = self._factor()
            if operator == "/" and right == 0:
                raise ExpressionError("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def _factor(self) -> Fraction:
        if self._take("-"):
            return -self._factor()
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ExpressionError("a bracket is not closed")
            return value
        if self._next >= len(self._tokens) or not self._tokens[self._next].isdigit():
            raise ExpressionError("a number is missing")
        self._next += 1
        self._numbers.append(int(self._tokens[self._next - 1]))
        return Fraction(self._numbers[-1])
