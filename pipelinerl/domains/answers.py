"""Finds the stated answer in a model's text: `<answer>` tags, `\\boxed{}`, whole numbers. Never raises, linear time.

The last complete statement counts, and what a model wrote in `<think>` tags is not a statement.
"""

from __future__ import annotations

import re

# Python refuses integers of more than 4300 digits; no task here needs more than these.
MAX_DIGITS = 18
_NUMBER = re.compile(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}")
_BOXED = ("\\boxed{", "\\fbox{")


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`; the whole text if there is none."""
    return text.rpartition("</think>")[2]


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
    start, opening = max((text.rfind(opening), opening) for opening in _BOXED)
    if start < 0:
        return None
    begin = start + len(opening)
    depth = 1
    for index in range(begin, len(text)):
        if text[index] == "{" and text[index - 1] != "\\":
            depth += 1
        elif text[index] == "}" and text[index - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[begin:index].strip()
    return None


def whole_number(text: str) -> int | None:
    """Return `text` as an integer of ASCII digits, thousands separators allowed; None if it is something else."""
    plain = text.strip().replace(",", "") if len(text) <= 4 * MAX_DIGITS else ""
    return int(plain) if _NUMBER.fullmatch(plain) else None
