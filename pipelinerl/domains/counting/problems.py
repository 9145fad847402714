"""Problems of counting: a word of random letters and one letter to count. Pure; called through `dataset_loader`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pipelinerl.domains.splits import draw_problems


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

    return draw_problems("counting", dataset_names, {"train": num_train, "test": num_test}, seed, draw)


def question(problem: dict[str, Any]) -> str:
    """Return the words of a problem."""
    return (
        f'How many times does "{problem["letter"]}" occur in "{problem["word"]}"? '
        "Output the answer as <answer>number</answer>."
    )


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    return f"<answer>{problem['answer']}</answer>"
