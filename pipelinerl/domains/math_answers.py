"""Whether two mathematical answers are equal: math-verify, where it is no looser than equality.

It compares numbers by a fixed number of decimals, and leaves out units, bases, braces, the order of letters and how
often a value is listed. What both answers say of these is compared here first.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from pipelinerl.domains.data import optional

MAX_ANSWER_CHARACTERS = 2000
_IGNORED = re.compile(r"\\[,;!: ]|\\(?:left|right|displaystyle)(?![a-zA-Z])|~")
# White space stays between two digits: 2 3 is not 23.
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
# What math-verify reads only with its white space: rows of a matrix, a command before a letter.
_NEEDS_SPACE = re.compile(r"\\\\|\\[A-Za-z]+\s+[A-Za-z]")
_THOUSANDS = re.compile(r"(?<![\d.,])([+-]?\d{1,3}(?:,\d{3})+)(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED_NUMBER = re.compile(r"(-?\d+)[ +]?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=[ +])(\d+)/(\d+))")
_NUMBER = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+))(?:(?:[eE]|\\(?:times|cdot)10\^)(?:\{([+-]?\d{1,4})\}|([+-]?\d{1,4})))?"
)
_REPEATING = re.compile(r"([+-]?)(\d{0,50})\.(\d{0,50})(?:\((\d{1,50})\)|\\(?:overline|bar|dot)\{?(\d{1,50})\}?)")
_EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])|\\empty(?![a-zA-Z])|\u2205")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|mbox)\{([^{}]*)\}")
_LETTERS = re.compile(r"[A-Z]{2,}")
_BASE = re.compile(r"[\dA-F.]+_\{?(\d+)\}?")
_PERCENT = re.compile(r"\\?%$|\\(?:text|mathrm)\{(?:percent|%|\\%)\}$")
_UNIT = re.compile(r"(?:.\\(?:text|mathrm|mbox)\{\s*([a-zA-Z]+)[^{}]*\}|\d([a-zA-Z]+))(?:\^\{?[23]\}?)?$")
_SUM = re.compile(r"(?:[\d.+*/^(){}-]|\\(?:cdot|times|frac))+")
#: Words for units that are different quantities; other words behind a number say what is counted.
_UNITS = MappingProxyType(
    {
        word: words[0]
        for words in (
            *(("m", "meter", "meters", "metre", "metres"), ("cm", "centimeter", "centimeters"), ("mm", "millimeters")),
            *(("km", "kilometer", "kilometers"), ("in", "inch", "inches"), ("ft", "foot", "feet")),
            *(("yd", "yard", "yards"), ("mi", "mile", "miles"), ("mph",), ("kph", "kmh")),
            *(("s", "sec", "second", "seconds"), ("min", "minute", "minutes"), ("h", "hr", "hour", "hours")),
            *(("day", "days"), ("week", "weeks"), ("month", "months"), ("year", "years")),
            *(("g", "gram", "grams"), ("kg", "kilogram", "kilograms"), ("mg",), ("lb", "pound", "pounds")),
            *(("oz", "ounce", "ounces"), ("l", "liter", "liters"), ("ml", "milliliters"), ("gal", "gallons")),
            *(("dollar", "dollars", "usd"), ("cent", "cents"), ("euro", "euros"), ("degree", "degrees")),
            *(("radian", "radians", "rad"),),
        )
        for word in words
    }
)
# A decimal with so many digits, and so many of them after the point, may be a rounded value.
_ROUNDED_DIGITS = 6
# Digits of math-verify's comparison by value, for numbers of about 1; smaller ones need more.
_FLOAT_DIGITS, _EXACT_DIGITS, _MOST_DIGITS = 6, 15, 400


def same_answer(gold: str, stated: str) -> bool | None:
    """Return whether a stated answer is equal to the right one; None if it cannot be read.

    A missing unit, base, assignment (`x =`) or percent sign is no difference, another one is.
    """
    as_written = gold, stated
    gold, stated = plain(gold), plain(stated)
    if gold == stated:
        return True
    is_percent = [bool(_PERCENT.search(text)) for text in (gold, stated)]
    if any(is_percent):
        return _same_percent(gold, stated, *is_percent)
    numbers = [_as_number(text) for text in (gold, stated)]
    if numbers[0] is not None and numbers[1] is not None:
        return _same_number(numbers[0], numbers[1])
    first, equals, last = stated.partition("=")
    if equals and _SUM.fullmatch(first + last) and not same_answer(first, last):
        return False  # 2+3=4 is no way to say 4
    if _differ_in_form(gold, stated):
        return False
    gold, stated = (
        raw if _NEEDS_SPACE.search(raw) else text for raw, text in zip(as_written, (gold, stated), strict=True)
    )
    return _verified(gold, stated)


def plain(text: str) -> str:
    """Return LaTeX without what does not change its meaning: space, delimiters, commas in numbers. A repeating decimal
    becomes a fraction."""
    text = _IGNORED.sub("", text[: 2 * MAX_ANSWER_CHARACTERS].strip().strip("$"))
    text = _SPACE.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    if _SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    if repeating := _REPEATING.fullmatch(text):
        return _fraction(repeating)
    text = _EMPTY_SET.sub(r"\\emptyset", text)
    mixed = _MIXED_NUMBER.fullmatch(text)
    if mixed:
        whole, over, under = mixed[1], mixed[2] or mixed[4], mixed[3] or mixed[5]
        return f"{whole}\\frac{{{over}}}{{{under}}}"
    return text


def _fraction(repeating: re.Match[str]) -> str:
    sign, whole, before, cycle = *repeating.group(1, 2, 3), repeating[4] or repeating[5]
    shift = 10 ** len(before)
    value = Fraction(int((whole + before) or 0), shift) + Fraction(int(cycle), (10 ** len(cycle) - 1) * shift)
    over, under = f"{sign.replace('+', '')}{value.numerator}", value.denominator
    return over if under == 1 else f"\\frac{{{over}}}{{{under}}}"


def _as_number(text: str) -> Decimal | None:
    """Return an integer or a decimal, also in scientific notation; None for anything else."""
    match = _NUMBER.fullmatch(text)
    return None if match is None else Decimal(f"{match[1]}e{match[2] or match[3] or 0}")


def _same_number(first: Decimal, second: Decimal) -> bool:
    """Return whether they are equal, or one is the other, rounded to many digits."""
    if first == second:
        return True
    short = max(first, second, key=_last_place)
    last_place = _last_place(short)
    return _may_be_rounded(short) and abs(first - second) <= Decimal(5).scaleb(last_place - 1)


def _may_be_rounded(number: Decimal) -> bool:
    return _last_place(number) <= -_ROUNDED_DIGITS and len(number.as_tuple().digits) >= _ROUNDED_DIGITS


def _exact(text: str) -> str:
    """Return a decimal that is not a rounded value as a fraction, so that it is compared exactly; other texts as they
    are."""
    number = _as_number(text)
    if number is None or _may_be_rounded(number) or abs(number.adjusted()) > _MOST_DIGITS:
        return text
    over, under = number.as_integer_ratio()
    return str(over) if under == 1 else f"\\frac{{{over}}}{{{under}}}"


def _last_place(number: Decimal) -> int:
    return int(number.as_tuple().exponent)


def _same_percent(gold: str, stated: str, gold_is_percent: bool, stated_is_percent: bool) -> bool | None:
    """50% is 0.5, and 50 if the sign is left out."""
    amounts = _PERCENT.sub("", gold), _PERCENT.sub("", stated)
    same = same_answer(*amounts)
    if same or gold_is_percent == stated_is_percent:
        return same
    shares = [
        f"\\frac{{{text}}}{{100}}" if is_percent else text
        for text, is_percent in zip(amounts, (gold_is_percent, stated_is_percent), strict=True)
    ]
    return same_answer(*shares)


def _differ_in_form(gold: str, stated: str) -> bool:
    """Return whether they differ in something that math-verify leaves out."""
    if " " in gold + stated and re.search(r"\d \d", gold + stated):
        return True  # numbers side by side: nobody knows what is between them
    for one, other in ((gold, stated), (stated, gold)):
        if one.startswith("\\{") and not one.startswith("\\{(") and other.startswith(("(", "[")):
            return True
    words = [_TEXT.sub(r"\1", text) for text in (gold, stated)]
    if all(_LETTERS.fullmatch(word) for word in words):
        return words[0] != words[1]
    for stands_for in (_base, _unit):
        kinds = stands_for(gold), stands_for(stated)
        if None not in kinds and kinds[0] != kinds[1]:
            return True
    return _repeats(gold, stated)


def _base(text: str) -> str | None:
    match = _BASE.fullmatch(text)
    return match[1] if match else None


def _unit(text: str) -> str | None:
    match = _UNIT.search(text)
    return _UNITS.get((match[1] or match[2]).lower()) if match else None


def _repeats(gold: str, stated: str) -> bool:
    """Return whether one of two lists names a value several times and the other does not."""
    if "\\{" in gold + stated or any(bracket in gold + stated for bracket in "()[]&"):
        return False
    counts = [sorted(Counter(text.split(",")).values()) for text in (gold, stated)]
    return counts[0] != counts[1] and any(count[-1] > 1 for count in counts)


def _verified(gold: str, stated: str) -> bool | None:
    math_verify = optional("math_verify", "math", "math")
    if "." not in gold or "." not in stated:  # between decimal expressions, a rounding error does not count
        gold, stated = _exact(gold), _exact(stated)
    wanted, found = _parsed(gold), _parsed(stated)
    if not found:
        return None
    more = min(max(0, *(_digits_before(value) for value in (*wanted, *found))), _MOST_DIGITS)
    return bool(
        math_verify.verify(
            wanted,
            found,
            float_rounding=_FLOAT_DIGITS + more,
            numeric_precision=_EXACT_DIGITS + more,
            timeout_seconds=None,
        )
    )


def _parsed(answer: str) -> list[Any]:
    """Return what math-verify makes of an answer; empty if it cannot read it."""
    math_verify = optional("math_verify", "math", "math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadline is off
    latex = (math_verify.LatexExtractionConfig(),)
    found: list[Any] = math_verify.parse(f"\\boxed{{{answer}}}", extraction_config=latex, parsing_timeout=None)
    return found


def _digits_before(value: Any) -> int:
    """Return how many digits after the point are 0 in the smallest number of an expression."""
    sympy = optional("sympy", "math", "math")
    if isinstance(value, str):
        return 0
    digits = 0
    nodes = sympy.preorder_traversal(value)
    for node in nodes:
        if getattr(node, "is_number", False):
            nodes.skip()
            size = abs(sympy.N(node, 5)) if not node.is_Integer else 1
            if getattr(size, "is_Float", False) and 0 < size < 1:
                digits = max(digits, math.ceil(-sympy.log(size, 10).evalf(5)) - 1)
    return digits
