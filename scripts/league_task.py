"""The two tasks of `league.py`, for both systems: `sums` is learned, `stories` only takes time.

A sum has an answer of at most 16 tokens, right or wrong. A story has as many words as its prompt asks for, so answers
are of very uneven length, and its reward is a share of letters that nobody minds.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.answers import tagged_answer, whole_number
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult

PROBLEMS = 8000
LETTER = "a"
_EXAMPLES = (("7 + 5", 12), ("13 - 9", 4), ("20 + 31", 51), ("6 - 8", -2))
_WHO = ("a gardener", "two sisters", "an old sailor", "a young fox", "the last dragon", "a clockmaker", "a lost robot")
_WHERE = ("on an island", "under a bridge", "in a snowed-in village", "at a night market", "on a train", "in a desert")
_WHAT = ("a broken promise", "a map without names", "an unexpected guest", "a song", "a race", "a locked door")
#: Words asked for, from one line to more than the tokens allow.
_WORDS = (15, 40, 90, 180, 350)


@dataclass(frozen=True)
class Task:
    """What both systems need to know about a task; `success`: the training reward to time, None: only speed counts."""

    max_tokens: int
    success: float | None


TASKS = {"sums": Task(16, 0.4), "stories": Task(512, None)}


def problems(task: str, count: int = PROBLEMS) -> list[dict[str, Any]]:
    """The problems of a task, the same in every process: `messages`, and `answer` ("" where none is right)."""
    rng = random.Random(task)
    return [_sum(rng) if task == "sums" else _story(rng) for _ in range(count)]


def _sum(rng: random.Random) -> dict[str, Any]:
    a, b, sign = rng.randrange(100), rng.randrange(100), rng.choice("+-")
    messages = [{"role": "system", "content": "You are a calculator. Answer with <answer>number</answer>."}]
    for terms, value in _EXAMPLES:
        messages.append({"role": "user", "content": f"{terms} = ?"})
        messages.append({"role": "assistant", "content": f"<answer>{value}</answer>"})
    messages.append({"role": "user", "content": f"{a} {sign} {b} = ?"})
    return {"messages": messages, "answer": str(a + b if sign == "+" else a - b)}


def _story(rng: random.Random) -> dict[str, Any]:
    what = f"about {rng.choice(_WHO)} {rng.choice(_WHERE)} and {rng.choice(_WHAT)}"
    content = f"Write a story {what}, in about {rng.choice(_WORDS)} words."
    return {"messages": [{"role": "user", "content": content}], "answer": ""}


def reward(text: str, answer: str) -> float:
    """1 for the right number in `<answer>` tags, else 0; without an answer the share of `LETTER` among the letters."""
    if answer:
        stated = tagged_answer(text)
        return float(stated is not None and whole_number(stated) == int(answer))
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return letters.count(LETTER) / max(len(letters), 1)


def load_problems(dataset_names: list[str], task: str) -> list[dict[str, Any]]:
    return [{**problem, "dataset": name} for name in dataset_names for problem in problems(task)]


async def generate_rollout(cfg: Any, llm: Any, problem: dict[str, Any], session: Any) -> RolloutResult:
    started = time.time()
    call = await llm_async_generate(llm, Prompt(messages=problem["messages"]), session)
    text = make_training_text(llm, call)
    text.reward = reward(call.output.content or "", problem["answer"])
    is_right = bool(problem["answer"]) and text.reward == 1.0
    metrics = BaseMetrics(reward=text.reward, success=is_right, no_error=True, no_answer=not call.output.content)
    return RolloutResult(
        training_texts=[text], metrics=metrics, latency=time.time() - started, dataset_name=problem["dataset"]
    )
