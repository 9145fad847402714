"""Mathematics with a final answer: GSM8K, MATH, AIME and the like, JSONL files, and small sums made offline.

A data set name is `train` or `test` (small sums), one of `KNOWN`, the path of a JSONL file, or a data set on the hub as
`owner/name`, `owner/name:split` or `owner/name:config:split`.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.answers import boxed_answer, tagged_answer
from pipelinerl.domains.data import SPLITS, draw_problems, load_hub_rows, optional, read_jsonl
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.protocol import Grade, grader

_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def draw_sums(name: str, sizes: tuple[int, int], max_operand: int, seed: int) -> list[dict[str, Any]]:
    """Return sums of two or three numbers of 0..max_operand with + - *."""

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        first, second, third = (rng.randint(0, max_operand) for _ in range(3))
        operator = rng.choice("+-*")
        value = {"+": first + second, "-": first - second, "*": first * second}[operator]
        words = f"{first} {_WORDS[operator]} {second}"
        has_third = rng.random() < 0.5
        if has_third:
            words, value = f"{words}, and then plus {third}", value + third
        difficulty = 0.5 * has_third + 0.5 * (operator == "*")
        problem = {"task": f"What is {words}?", "answer": str(value), "difficulty": difficulty}
        return words, problem

    return draw_problems("math", [name], sizes, seed, draw)


#: Data sets on the hub by name: path, config, split.
KNOWN: Mapping[str, tuple[str, str | None, str]] = MappingProxyType(
    {
        "gsm8k_train": ("openai/gsm8k", "main", "train"),
        "gsm8k_test": ("openai/gsm8k", "main", "test"),
        "math_500": ("HuggingFaceH4/MATH-500", None, "test"),
        "aime_2024": ("HuggingFaceH4/aime_2024", None, "train"),
        "aime_2025": ("MathArena/aime_2025", None, "train"),
        "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", None, "train"),
        "open_reasoner_zero": ("Open-Reasoner-Zero/orz_math_57k_collection", None, "train"),
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
    optional("math_verify", "math", "math")
    problems: list[dict[str, Any]] = []
    for name in dataset_names:
        if name in SPLITS:
            problems += draw_sums(name, (num_train, num_test), max_operand, seed)
            continue
        rows = _rows(str(name))[:limit]
        problems += [_problem(row, index, str(name)) for index, row in enumerate(rows)]
    return problems


def _rows(name: str) -> list[dict[str, Any]]:
    if name.endswith((".jsonl", ".json")):
        return read_jsonl(Path(name), "math")
    if name in KNOWN:
        return load_hub_rows(*KNOWN[name], "math")
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
    """Return the final answer in a reference solution: after `####` (GSM8K), in `\\boxed{}` (MATH), or all of it."""
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    return boxed_answer(text) or text.strip()


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    return f"\\boxed{{{problem['answer']}}}"


MAX_ANSWER_CHARACTERS = 2000
_SPACE = re.compile(r"\s+|\\[,;!:]|\\(?:left|right|displaystyle)(?![a-zA-Z])")


@grader(preload="math_verify")
def verify_math(text: str, problem: dict[str, Any]) -> Grade:
    """1 if the last `\\boxed{}` (or `<answer>`) is mathematically equal to the problem's answer."""
    math_verify = optional("math_verify", "math", "math")
    stated = boxed_answer(text)
    if stated is None:
        stated = tagged_answer(text)
    if not stated:
        return Grade(0.0, "no_answer")
    gold = str(problem["answer"])
    if plain(stated) == plain(gold):
        return Grade(1.0, "correct")
    if len(stated) > MAX_ANSWER_CHARACTERS or "\0" in stated:
        return Grade(0.0, "unparsable")
    wanted = parsed(gold)
    found = parsed(stated)
    if not found:
        return Grade(0.0, "unparsable")
    right = math_verify.verify(wanted, found, timeout_seconds=None)
    return Grade(1.0, "correct") if right else Grade(0.0, "wrong")


def plain(text: str) -> str:
    """Return LaTeX without what does not change its meaning: space, delimiters, commas in numbers."""
    text = _SPACE.sub("", text[: 2 * MAX_ANSWER_CHARACTERS].strip().strip("$"))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def parsed(answer: str) -> list[Any]:
    """Return what math-verify makes of an answer; empty if it cannot read it."""
    math_verify = optional("math_verify", "math", "math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadline is off
    latex = (math_verify.LatexExtractionConfig(),)
    found: list[Any] = math_verify.parse(f"\\boxed{{{answer}}}", extraction_config=latex, parsing_timeout=None)
    return found


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the reference answer."""
    return verify_math(gold_answer(problem), problem).score


SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


async def generate_math_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for the final answer in `\\boxed{}` and grade it."""
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        verify_math,
        task=problem["task"],
        system_prompt=SYSTEM_PROMPT,
    )
