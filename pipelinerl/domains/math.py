"""Mathematics with a final answer: GSM8K, MATH, AIME and the like, JSONL files, and small sums made offline.

A data set is `train` or `test` (small sums), or one that `data_sets` reads, in one of the shapes of `shapes.SHAPES`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from pipelinerl.domains.answers import boxed_answer, tagged_answer
from pipelinerl.domains.data import optional
from pipelinerl.domains.data_sets import load_data_sets
from pipelinerl.domains.math_answers import MAX_ANSWER_CHARACTERS, plain, same_answer
from pipelinerl.domains.shapes import chat_text
from pipelinerl.domains.single_turn import single_turn
from pipelinerl.sandbox.protocol import Grade, grader

_WORDS = {"+": "plus", "-": "minus", "*": "times"}


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
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return the problems of all names, in order.

    Args:
        num_train, num_test, max_operand, seed: of the sums made here.
        fields, limit: see `load_data_sets`.

    Raises:
        DomainError: see `load_data_sets`, or math-verify is not installed.
    """
    optional("math_verify", "math", "math")

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        """A sum of two or three numbers of 0..max_operand with + - *."""
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

    return load_data_sets("math", dataset_names, draw, (num_train, num_test), seed, _problem, fields, limit)


#: What some data sets say of the form of the answer, in other words than ours.
_FORM = re.compile(
    r"^Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"\$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s*"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$"
    r"|\s*Present the answer in LaTex format: \\boxed\{Your answer\}\s*$"
    r"|\s*Let's think step by step and output the final answer after \"####\"\.?\s*$"
    r"|\s*Please reason step by step, and put your final answer within \\boxed\{\}\.\s*$"
)
_LEVEL = re.compile(r"(?:Level )?([1-5])")


def _problem(values: dict[str, Any]) -> dict[str, Any] | str:
    """Return the problem of a row's values, or why there is none."""
    task = chat_text(values["task"], "user")
    if not task:
        return "without a text as the task"
    stated, max_words = _text(values.get("answer")), _MAX_WORDS
    if stated is None:
        solution = values.get("solution")
        stated, max_words = chat_text(solution, "assistant") or _text(solution), _MAX_WORDS_OF_SOLUTION
    answer = final_answer(stated, max_words) if stated else None
    if answer is None:
        return "without a final answer (in `answer`, or marked in the solution with #### or \\boxed{})"
    level = _LEVEL.fullmatch(str(values.get("level")))  # MATH has levels 1 to 5
    difficulty = (int(level[1]) - 1) / 4 if level else values.get("difficulty")
    problem = {"task": _FORM.sub("", task), "answer": answer}
    return problem if not isinstance(difficulty, int | float) else problem | {"difficulty": difficulty}


def _text(answer: Any) -> str | None:
    """Return an answer as a text; of a list, its only element."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) else None


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


generate_math_rollout = single_turn(verify_math, itemgetter("task"), SYSTEM_PROMPT)
