"""Problems of programming: small functions made here, or a JSONL file. Called through `dataset_loader`.

A line of a file has `task`, and either `tests` of {"input", "output"} for a program that reads stdin and writes
stdout, or `function` and `tests` of {"args", "expected"}; `solution` is optional.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl.domains.coding.tasks import TASKS, solution_source
from pipelinerl.domains.datafiles import read_jsonl
from pipelinerl.domains.splits import SPLITS, draw_problems
from pipelinerl.errors import DomainError

_NUM_TESTS = 4


def load_problems(
    dataset_names: Sequence[str], *, num_train: int = 64, num_test: int = 16, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the problems of the names `train` and `test` (made here) and of JSONL files.

    Raises:
        DomainError: a file cannot be read, or a line lacks a field.
    """

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        task = rng.choice(TASKS)
        number = rng.randint(2, 12)
        tests = []
        for _ in range(_NUM_TESTS):
            argument = task.draw_argument(rng)
            tests.append({"args": [argument], "expected": task.solve(argument, number)})
        problem = {
            "task": f"Write a Python function solve(x) that returns {task.words.format(k=number)}",
            "function": "solve",
            "tests": tests,
            "solution": solution_source(task, number),
        }
        return f"{task.solve.__name__}/{number}", problem

    problems: list[dict[str, Any]] = []
    for name in dataset_names:
        if str(name).endswith(".jsonl"):
            problems += [_checked(row, str(name), index) for index, row in enumerate(read_jsonl(Path(name), "coding"))]
        else:
            sizes = dict(zip(SPLITS, (num_train, num_test), strict=True))
            problems += draw_problems("coding", [name], sizes, seed, draw)
    return problems


def _checked(row: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    keys = {"args", "expected"} if row.get("function") else {"input", "output"}
    tests = row.get("tests")
    is_right = isinstance(tests, list) and tests and all(isinstance(test, dict) and keys <= set(test) for test in tests)
    function = row.get("function")
    if not is_right or not isinstance(row.get("task"), str) or (function and not str(function).isidentifier()):
        raise DomainError(
            f"coding: {name}:{index + 1}: expected a text `task` and a list `tests` of {sorted(keys)}. "
            "Correct the line."
        )
    return {"dataset": Path(name).stem, **row}


def gold_answer(problem: dict[str, Any]) -> str | None:
    """Return a right output, if the problem has a solution."""
    solution = problem.get("solution")
    return None if solution is None else f"```python\n{solution}\n```"
