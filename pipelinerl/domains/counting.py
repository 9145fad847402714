"""Counting letters in a word: a tiny procedural task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pipelinerl.domains.answers import tagged_answer, whole_number
from pipelinerl.domains.data import draw_problems
from pipelinerl.domains.single_turn import single_turn
from pipelinerl.sandbox.protocol import Grade, grader


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 2000,
    num_test: int = 200,
    min_length: int = 3,
    max_length: int = 12,
    letters: str = "abcde",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return problems of the splits `train` and `test`: words of `min_length` to `max_length` of `letters`."""

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        word = "".join(rng.choices(letters, k=rng.randint(min_length, max_length)))
        letter = rng.choice(letters)
        difficulty = (len(word) - min_length) / max(max_length - min_length, 1)
        problem = {"word": word, "letter": letter, "answer": word.count(letter), "difficulty": difficulty}
        return f"{word}/{letter}", problem

    return draw_problems("counting", dataset_names, (num_train, num_test), seed, draw)


def question(problem: dict[str, Any]) -> str:
    """Return the words of a problem."""
    return (
        f'How many times does "{problem["letter"]}" occur in "{problem["word"]}"? '
        "Output the answer as <answer>number</answer>."
    )


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    return f"<answer>{problem['answer']}</answer>"


@grader
def verify_counting(text: str, problem: dict[str, Any]) -> Grade:
    """1 for the right number in `<answer>` tags."""
    stated = tagged_answer(text)
    if stated is None:
        return Grade(0.0, "no_answer")
    number = whole_number(stated)
    if number is None:
        return Grade(0.0, "unparsable")
    return Grade(1.0, "correct") if number == problem["answer"] else Grade(0.0, "wrong")


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the right output."""
    return verify_counting(gold_answer(problem), problem).score


generate_counting_rollout = single_turn(verify_counting, question)
