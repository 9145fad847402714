"""Problems of function calling: functions, a request, and the calls that answer it. Pure but for files.

Called through `dataset_loader`. Made here (`train`, `test`) or read from a JSONL file with `task`, `tools` (OpenAI
format) and `expected`, a list of {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.domains.datafiles import read_jsonl
from pipelinerl.domains.fn_calling.catalog import CATALOG, draw_call, tool_schema
from pipelinerl.domains.splits import SPLITS, draw_problems
from pipelinerl.errors import DomainError


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 1000,
    num_test: int = 100,
    max_calls: int = 2,
    num_tools: int = 4,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return problems with 1 to `max_calls` calls, each among `num_tools` functions.

    Raises:
        DomainError: a file cannot be read, or a line lacks a field.
    """

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        offered = rng.sample(sorted(CATALOG), num_tools)
        chosen = rng.sample(offered, rng.randint(1, min(max_calls, num_tools)))
        drawn = [draw_call(name, rng) for name in chosen]
        task = " Then ".join(request for request, _ in drawn)
        problem = {
            "task": task,
            "tools": [tool_schema(name) for name in offered],
            "expected": [
                {"name": name, "arguments": arguments} for name, (_, arguments) in zip(chosen, drawn, strict=True)
            ],
            "difficulty": (len(chosen) - 1) / max(max_calls - 1, 1),
        }
        return f"{task}{offered}", problem

    problems: list[dict[str, Any]] = []
    for name in dataset_names:
        if str(name).endswith(".jsonl"):
            problems += [
                _checked(row, str(name), index) for index, row in enumerate(read_jsonl(Path(name), "fn_calling"))
            ]
        else:
            sizes = dict(zip(SPLITS, (num_train, num_test), strict=True))
            problems += draw_problems("fn_calling", [name], sizes, seed, draw)
    return problems


def _checked(row: dict[str, Any], name: str, index: int) -> dict[str, Any]:
    if not isinstance(row.get("task"), str) or not all(isinstance(row.get(key), list) for key in ("tools", "expected")):
        raise DomainError(f"fn_calling: {name}:{index + 1}: expected a text `task`, lists `tools` and `expected`.")
    return {"dataset": Path(name).stem, **row}


def system_prompt(problem: dict[str, Any]) -> str:
    """Return the functions and the format of calls in words."""
    tools = "\n".join(msgspec.json.encode(tool).decode() for tool in problem["tools"])
    return (
        f"You can call these functions:\n{tools}\nAnswer with one block for each call and nothing else:\n"
        '<tool_call>{"name": "function", "arguments": {"parameter": "value"}}</tool_call>'
    )


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    calls = [msgspec.json.encode(call).decode() for call in problem["expected"]]
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)
