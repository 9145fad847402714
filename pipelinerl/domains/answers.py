"""Finds the stated answer in a model's text (`<answer>` tags, `\\boxed{}`, whole numbers) and compares plain values.

The last complete statement counts, and what a model thinks (`after_thinking`) is not a statement. Never raises, linear
time.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pipelinerl.llm.tokens import after_thinking

# Python refuses integers of more than 4300 digits; no task here needs more than these.
MAX_DIGITS = 18
_NUMBER = re.compile(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}")
# An opened box, a box around one word without braces (`\boxed 50`), an escaped character, or a brace.
_BOXES = re.compile(
    r"(?P<box>\\?\\(?:boxed|fbox)\s*\{)"
    r"|\\?\\boxed\s*(?P<bare>-?\d+(?:[.,/]\d+)*|(?<=\s)[A-Za-z])(?=[\s$.,;]|\\[\])]|$)"
    r"|\\.|(?P<brace>[{}])",
    re.DOTALL,
)
# How far floats that were computed in another order may be apart, relative to the expected one, or from a 0.
_FLOAT_TOLERANCE = 1e-9
_ZERO_TOLERANCE = 1e-12


def tagged_answer(text: str, tag: str = "answer") -> str | None:
    """Return the content of the last complete `<answer>...</answer>`, stripped, or None."""
    text = after_thinking(text)
    end = text.rfind(f"</{tag}>")
    if end < 0:
        return None
    start = text.rfind(f"<{tag}>", 0, end)
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def boxed_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` whose braces close, or None."""
    text = after_thinking(text)
    answer, answer_begin = None, -1
    opened: list[int] = []  # where the contents of open boxes begin; -1: of other braces
    for match in _BOXES.finditer(text):
        begin, found = -1, None
        if match["bare"] is not None:
            begin, found = match.start(), match["bare"]
        elif match["box"] is not None or match["brace"] == "{":
            opened.append(match.end() if match["box"] is not None else -1)
        elif match["brace"] is not None and opened:
            begin = opened.pop()
            found = text[begin : match.start()].strip() if begin > answer_begin else None
        if found is not None and begin > answer_begin:
            answer, answer_begin = found, begin
    return answer


def same_value(found: Any, expected: Any, *, strip: bool = False) -> bool:
    """Return whether two JSON values are equal, at every level: 1 is 1.0 but not true.

    Numbers are equal by their value; beside an expected float, a rounding error does not count.

    Args:
        found: what a model or its program made.
        expected: what is right.
        strip: white space around texts does not count.
    """
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, str) and isinstance(expected, str):
        return found.strip() == expected.strip() if strip else found == expected
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same_value(value, expected[key], strip=strip) for key, value in found.items()
        )
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(
            same_value(a, b, strip=strip) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(expected, float) and isinstance(found, int | float):
        return same_float(found, expected)
    return bool(found == expected)


def same_float(found: float, expected: float) -> bool:
    """Return whether two numbers are equal but for a rounding error."""
    try:
        return found == expected or math.isclose(
            found, expected, rel_tol=_FLOAT_TOLERANCE, abs_tol=0.0 if expected else _ZERO_TOLERANCE
        )
    except OverflowError:  # an integer beyond all floats
        return False


def whole_number(text: str) -> int | None:
    """Return `text` as an integer of ASCII digits, thousands separators allowed; None if it is something else."""
    plain = text.strip().replace(",", "") if len(text) <= 4 * MAX_DIGITS else ""
    return int(plain) if _NUMBER.fullmatch(plain) else None
