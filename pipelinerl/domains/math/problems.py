"""Problems of mathematics by the names of their data sets. Called through `dataset_loader`; waits for files or the hub.

A name is `train` or `test` (small sums made here, nothing is loaded), one of `KNOWN`, the path of a JSONL file, or any
data set of the hub as `owner/name`, `owner/name:split` or `owner/name:config:split`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipelinerl.domains.answers import boxed_answer
from pipelinerl.domains.datafiles import load_hub_rows, read_jsonl
from pipelinerl.domains.math.arithmetic import draw_sums
from pipelinerl.domains.splits import SPLITS
from pipelinerl.errors import DomainError


@dataclass(frozen=True)
class HubSource:
    """Where a known data set is on the hub."""

    path: str
    config: str | None
    split: str


KNOWN: Mapping[str, HubSource] = MappingProxyType(
    {
        "gsm8k_train": HubSource("openai/gsm8k", "main", "train"),
        "gsm8k_test": HubSource("openai/gsm8k", "main", "test"),
        "math_500": HubSource("HuggingFaceH4/MATH-500", None, "test"),
        "aime_2024": HubSource("HuggingFaceH4/aime_2024", None, "train"),
        "aime_2025": HubSource("MathArena/aime_2025", None, "train"),
        "deepscaler": HubSource("agentica-org/DeepScaleR-Preview-Dataset", None, "train"),
        "open_reasoner_zero": HubSource("Open-Reasoner-Zero/orz_math_57k_collection", None, "train"),
    }
)
_QUESTION_KEYS = ("task", "problem", "question", "prompt")
_ANSWER_KEYS = ("answer", "final_answer", "solution")


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 2000,
    num_test: int = 200,
    max_operand: int = 20,
    seed: int = 0,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return the problems of all names, in order.

    Args:
        num_train, num_test, max_operand, seed: of the sums made here.
        limit: at most so many problems of each other data set.

    Raises:
        DomainError: a data set cannot be had, or math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise DomainError(
            "math: the package math-verify, which grades answers, is not installed. Install pipelinerl[math] (in a "
            "checkout: pip install -e '.[math]'), or start another experiment, for instance --config-name guessing."
        )
    problems: list[dict[str, Any]] = []
    for name in dataset_names:
        if name in SPLITS:
            problems += draw_sums([name], {"train": num_train, "test": num_test}, max_operand, seed)
            continue
        rows = _rows(str(name))[:limit]
        problems += [_problem(row, index, str(name)) for index, row in enumerate(rows)]
    return problems


def _rows(name: str) -> list[dict[str, Any]]:
    if name.endswith((".jsonl", ".json")):
        return read_jsonl(Path(name), "math")
    if name in KNOWN:
        source = KNOWN[name]
        return load_hub_rows(source.path, source.config, source.split, "math")
    if "/" not in name:
        raise DomainError(
            f"math: unknown data set {name!r}, expected one of {[*SPLITS, *KNOWN]}, the path of a .jsonl file, or "
            "owner/name[:config]:split of a data set on the hub. Change train_dataset_names or test_dataset_names."
        )
    path, *rest = name.split(":")
    config = rest[0] if len(rest) == 2 else None
    return load_hub_rows(path, config, rest[-1] if rest else "train", "math")


def _problem(row: dict[str, Any], index: int, name: str) -> dict[str, Any]:
    question = next((row[key] for key in _QUESTION_KEYS if isinstance(row.get(key), str)), None)
    raw = next((row[key] for key in _ANSWER_KEYS if isinstance(row.get(key), str | int | float)), None)
    if question is None or raw is None:
        raise DomainError(
            f"math: row {index} of {name!r} has the fields {sorted(row)}, expected one of {_QUESTION_KEYS} and one of "
            f"{_ANSWER_KEYS}. Rename them."
        )
    dataset = Path(name).stem if name.endswith((".jsonl", ".json")) else name
    problem = {"id": f"{dataset}-{row.get('id', index)}", "dataset": dataset, "task": question}
    level = row.get("level")
    if isinstance(level, int) and 1 <= level <= 5:  # MATH has levels 1 to 5
        problem["difficulty"] = (level - 1) / 4
    return {**problem, "answer": final_answer(str(raw))}


def final_answer(text: str) -> str:
    """Return the final answer in a reference solution: behind `####` (GSM8K), in `\\boxed{}` (MATH), or all of it."""
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    return boxed_answer(text) or text.strip()


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    return f"\\boxed{{{problem['answer']}}}"
