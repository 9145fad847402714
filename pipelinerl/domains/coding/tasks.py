"""Small functions to write: words, a reference solution, and how to draw arguments. Pure.

Called by the problem maker. A reference solution takes the argument and a number `k` that makes variants.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """`words` complete "a function solve(x) that returns ..."; `{k}` in them is the variant's number."""

    words: str
    solve: Callable[[Any, int], Any]
    draw_argument: Callable[[random.Random], Any]


def sum_of_multiples(x: list[int], k: int) -> int:
    return sum(value for value in x if value % k == 0)


def count_above(x: list[int], k: int) -> int:
    return sum(value > k for value in x)


def every_kth(x: list[int], k: int) -> list[int]:
    return x[::k]


def rotated(x: list[int], k: int) -> list[int]:
    return x[k % len(x) :] + x[: k % len(x)] if x else []


def in_base(x: int, k: int) -> list[int]:
    digits = []
    while x:
        digits.append(x % k)
        x //= k
    return digits[::-1] or [0]


def long_words(x: str, k: int) -> list[str]:
    return [word for word in x.split() if len(word) >= k]


def shifted(x: str, k: int) -> str:
    return "".join(chr((ord(letter) - 97 + k) % 26 + 97) if letter.isalpha() else letter for letter in x)


def largest_window(x: list[int], k: int) -> int:
    return max(sum(x[start : start + k]) for start in range(max(len(x) - k, 0) + 1))


def chunks(x: list[int], k: int) -> list[list[int]]:
    return [x[start : start + k] for start in range(0, len(x), k)]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(1, 15))]


def _number(rng: random.Random) -> int:
    return rng.randint(1, 5000)


def _sentence(rng: random.Random) -> str:
    words = ("".join(rng.choices("abcdefghij", k=rng.randint(1, 14))) for _ in range(rng.randint(1, 8)))
    return " ".join(words)


TASKS = (
    Task("the sum of the numbers in the list x that are divisible by {k}.", sum_of_multiples, _numbers),
    Task("how many numbers in the list x are greater than {k}.", count_above, _numbers),
    Task("a list of every {k}th element of the list x, starting with the first.", every_kth, _numbers),
    Task("the list x rotated to the left by {k} places.", rotated, _numbers),
    Task("the digits of the whole number x in base {k}, as a list with the highest digit first.", in_base, _number),
    Task("the list of words in the text x that have at least {k} letters.", long_words, _sentence),
    Task(
        "the text x with each lower-case letter moved {k} places on in the alphabet, around its end.",
        shifted,
        _sentence,
    ),
    Task(
        "the largest sum of {k} neighbouring numbers in the list x (of all of them, if there are fewer).",
        largest_window,
        _numbers,
    ),
    Task("the list x cut into lists of {k} elements; the last one may be shorter.", chunks, _numbers),
)


def solution_source(task: Task, number: int) -> str:
    """Return the reference solution as a program with `solve(x)`."""
    source = inspect.getsource(task.solve)
    return f"{source}\n\ndef solve(x):\n    return {task.solve.__name__}(x, {number})"
