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
from pipelinerl.domains.math_answers import MAX_ANSWER_CHARACTERS, plain, same_answer
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.protocol import Grade, grader

logger = logging.getLogger(__name__)

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
_FINAL = "Give it in `answer`, or mark it in the solution with #### or \\boxed{}"
# A text with more words than this is a solution, not an answer; fewer for what is called a solution.
_MAX_WORDS, _MAX_WORDS_OF_SOLUTION = 8, 3
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


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
        found = [problem for index, row in enumerate(rows) if (problem := _problem(row, index, str(name)))]
        if rows and not found:
            raise DomainError(f"math: no row of {name!r} has a final answer. {_FINAL}.")
        if len(found) < len(rows):
            logger.warning("%s: %d rows without a final answer are left out. %s.", name, len(rows) - len(found), _FINAL)
        problems += found
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


def _problem(row: dict[str, Any], index: int, name: str) -> dict[str, Any] | None:
    """Return the problem of a row, or None if it has no final answer."""
    if isinstance(row.get("0"), dict) and isinstance(row.get("1"), dict):  # a conversation (Open-Reasoner-Zero)
        truth = row["1"].get("ground_truth")
        row = {"problem": row["0"].get("value"), "answer": truth.get("value") if isinstance(truth, dict) else None}
    question = next((row[key] for key in _QUESTION_KEYS if isinstance(row.get(key), str)), None)
    key = next((key for key in _ANSWER_KEYS if isinstance(row.get(key), str | int | float)), None)
    if question is None or key is None:
        raise DomainError(
            f"math: row {index} of {name!r} has the fields {sorted(row)}, expected one of {_QUESTION_KEYS} and one of "
            f"{_ANSWER_KEYS}. Rename them."
        )
    answer = final_answer(str(row[key]), _MAX_WORDS_OF_SOLUTION if key == "solution" else _MAX_WORDS)
    if answer is None:
        return None
    dataset = Path(name).stem if name.endswith((".jsonl", ".json")) else name
    problem = {"id": f"{dataset}-{row.get('id', index)}", "dataset": dataset, "task": question}
    level = row.get("level")
    if isinstance(level, int) and 1 <= level <= 5:  # MATH has levels 1 to 5
        problem["difficulty"] = (level - 1) / 4
    return {**problem, "answer": answer}


def final_answer(text: str, max_words: int = _MAX_WORDS) -> str | None:
    """Return the final answer in a reference solution: after `####` (GSM8K), in `\\boxed{}` (MATH), or all of it.

    None if it has more than `max_words` words, or is too long: it is no answer, and no output could match it.
    """
    answer = text.rpartition("####")[2].strip() if "####" in text else boxed_answer(text) or text.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS or len(_WORD.findall(answer)) > max_words:
        return None
    return plain(answer) if re.fullmatch(r"[\d,.\s$-]+", answer) else answer


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    return f"\\boxed{{{problem['answer']}}}"


@grader(preload="math_verify")
def verify_math(text: str, problem: dict[str, Any]) -> Grade:
    """1 if the last `\\boxed{}` (or `<answer>`) is mathematically equal to the problem's answer."""
    stated = boxed_answer(text)
    if stated is None:
        stated = tagged_answer(text)
    if not stated:
        return Grade(0.0, "no_answer")
    if len(stated) > MAX_ANSWER_CHARACTERS or "\0" in stated:
        return Grade(0.0, "unparsable")
    is_right = same_answer(str(problem["answer"]), stated)
    return Grade(0.0, "unparsable") if is_right is None else Grade(float(is_right), "correct" if is_right else "wrong")


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the reference answer; 0 for a text that is no answer, though it is equal to itself."""
    gold = str(problem["answer"])
    return verify_math(gold_answer(problem), problem).score if final_answer(gold) is not None else 0.0


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
