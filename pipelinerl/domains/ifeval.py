"""Instruction following: a small task with constraints that a program can check.

Problems are made here (`train`, `test`) or rows of a data set with `prompt` and `constraints`, a list of
{"kind": ..., other keys: its arguments}, or with the instructions of IFEval.
"""

from __future__ import annotations

import ast
import contextlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.domains.data_sets import load_data_sets
from pipelinerl.domains.ifeval_instructions import INSTRUCTIONS, read_instructions
from pipelinerl.domains.shapes import chat_text
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.protocol import Grade, grader

Arguments = Mapping[str, Any]
_BULLET = re.compile(r"^[ \t]*[-*] \S", re.MULTILINE)


@dataclass(frozen=True)
class Constraint:
    """`words` is a template for the arguments; `check(text, arguments)` says whether `text` follows."""

    words: str
    check: Callable[[str, Arguments], bool]


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text; letters, digits and apostrophes make a word."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


def _is_json(text: str, arguments: Arguments) -> bool:
    body = text.strip()
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    try:
        value = msgspec.json.decode(body.encode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(value, dict) and all(key in value for key in arguments["keys"])


def _paragraphs(text: str) -> int:
    return len([part for part in text.strip().split("\n\n") if part.strip()])


CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        "min_words": Constraint("Use at least {count} words.", lambda text, a: len(words_of(text)) >= a["count"]),
        "max_words": Constraint("Use at most {count} words.", lambda text, a: len(words_of(text)) <= a["count"]),
        "keyword": Constraint('Include the word "{word}".', lambda text, a: a["word"] in words_of(text)),
        "forbidden": Constraint('Do not use the word "{word}".', lambda text, a: a["word"] not in words_of(text)),
        "lowercase": Constraint("Use lower-case letters only.", lambda text, a: text == text.lower()),
        "uppercase": Constraint("Use CAPITAL letters only.", lambda text, a: text == text.upper()),
        "no_commas": Constraint("Do not use commas.", lambda text, a: "," not in text),
        "bullets": Constraint(
            "Write exactly {count} bullet points, each on a line that starts with '- '.",
            lambda text, a: len(_BULLET.findall(text)) == a["count"],
        ),
        "paragraphs": Constraint(
            "Write exactly {count} paragraphs with an empty line between them.",
            lambda text, a: _paragraphs(text) == a["count"],
        ),
        "starts_with": Constraint(
            'Begin with exactly "{phrase}".', lambda text, a: text.lstrip().startswith(a["phrase"])
        ),
        "ends_with": Constraint('End with exactly "{phrase}".', lambda text, a: text.rstrip().endswith(a["phrase"])),
        "json": Constraint("Answer with one JSON object that has the keys {keys}.", _is_json),
    }
)


def describe(kind: str, arguments: Arguments) -> str:
    """Return the constraint in words."""
    shown = {key: ", ".join(value) if isinstance(value, list) else value for key, value in arguments.items()}
    return CONSTRAINTS[kind].words.format(**shown)


def follows(text: str, kind: str, arguments: Arguments) -> bool:
    """Whether `text` follows; an empty text follows nothing."""
    check = CONSTRAINTS[kind].check if kind in CONSTRAINTS else INSTRUCTIONS[kind]
    return bool(text.strip()) and check(text, arguments)


_TOPICS = (
    *("the sea", "a rainy day", "bread", "old maps", "a night train", "winter birds", "a small town", "lighthouses"),
    *("paper", "the first snow", "mountain paths", "tea", "a lost key", "bicycles", "morning light"),
)
_WORDS = ("river", "stone", "quiet", "window", "garden", "silver", "letter", "bridge", "candle", "harbour")
_STARTS = ("once more", "to begin with", "it is said")
_ENDS = ("the end", "and so it goes", "that is all")
_FILLER = ("people", "often", "talk", "about", "it", "and", "they", "always", "find", "something", "new", "to", "say")


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 2000,
    num_test: int = 200,
    max_constraints: int = 3,
    seed: int = 0,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return problems made here, with 1 to `max_constraints` constraints each, and those of data sets.

    Args:
        fields, limit: see `load_data_sets`.

    Raises:
        DomainError: see `load_data_sets`.
    """

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        constraints = _draw_constraints(rng, rng.randint(1, max_constraints))
        prompt = f"Write about {rng.choice(_TOPICS)}."
        difficulty = (len(constraints) - 1) / max(max_constraints - 1, 1)
        return f"{prompt}{constraints}", {"prompt": prompt, "constraints": constraints, "difficulty": difficulty}

    return load_data_sets("ifeval", dataset_names, draw, (num_train, num_test), seed, _problem, fields, limit)


def _problem(values: dict[str, Any]) -> dict[str, Any] | str:
    prompt = chat_text(values["task"], "user")
    if not prompt:
        return "without a text as the task"
    checks = values.get("checks")
    if "constraints" in values:
        constraints = _read_constraints(values["constraints"])
    elif "ids" in values:
        constraints = read_instructions(values["ids"], values.get("arguments"))
    else:
        # A Python literal in a list, which is read, not run.
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            checks = ast.literal_eval(checks) if isinstance(checks, str) else checks
        first = checks[0] if isinstance(checks, list) and checks and isinstance(checks[0], dict) else {}
        constraints = read_instructions(first.get("instruction_id"), first.get("kwargs"))
    if isinstance(constraints, str):
        return constraints
    own: dict[str, Any] = {key: values[key] for key in ("response", "difficulty") if key in values}
    return {"prompt": prompt, "constraints": constraints, **own}


def _read_constraints(constraints: Any) -> list[dict[str, Any]] | str:
    if not isinstance(constraints, list) or not constraints:
        return "without a list `constraints`"
    for constraint in constraints:
        try:
            kind = str(constraint["kind"])
            if kind not in INSTRUCTIONS:
                describe(kind, constraint)
        except (KeyError, TypeError, AttributeError) as error:
            kinds = ", ".join(CONSTRAINTS)
            return f"with an unknown constraint or without its argument {error}, expected a kind of {kinds}"
    return constraints


def _draw_constraints(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Draw one constraint from each of `count` families; those of different families can be met together."""
    if rng.random() < 0.1:
        return [{"kind": "json", "keys": sorted(rng.sample(_WORDS, 2))}]
    word, other = rng.sample(_WORDS, 2)
    families: list[list[dict[str, Any]]] = [
        [{"kind": "min_words", "count": rng.randint(5, 40)}, {"kind": "max_words", "count": rng.randint(30, 60)}],
        [{"kind": "keyword", "word": word}],
        [{"kind": "forbidden", "word": other}],
        [{"kind": "lowercase"}, {"kind": "no_commas"}],
        [{"kind": "bullets", "count": rng.randint(2, 4)}, {"kind": "paragraphs", "count": rng.randint(2, 3)}],
        [{"kind": "ends_with", "phrase": rng.choice(_ENDS)}],
        [{"kind": "starts_with", "phrase": rng.choice(_STARTS)}],
    ]
    families = rng.sample(families, count)
    chosen = [rng.choice(family) for family in families]
    kinds = {each["kind"] for each in chosen}
    # A bullet point cannot be the first thing and a phrase as well.
    return [each for each in chosen if not (each["kind"] == "starts_with" and "bullets" in kinds)]


def question(problem: dict[str, Any]) -> str:
    """Return the prompt with the constraints in words; prompts of IFEval say themselves what is asked for."""
    lines = [describe(each["kind"], each) for each in problem["constraints"] if each["kind"] in CONSTRAINTS]
    return "\n".join([problem["prompt"], *lines])


def gold_answer(problem: dict[str, Any]) -> str | None:
    """Return the row's own `response`, or a text that meets all constraints of a problem made here; None: neither."""
    if "response" in problem:
        return str(problem["response"])
    by_kind = {each["kind"]: each for each in problem["constraints"]}
    if not by_kind.keys() <= CONSTRAINTS.keys():
        return None
    if "json" in by_kind:
        return msgspec.json.encode(dict.fromkeys(by_kind["json"]["keys"], 1)).decode()
    forbidden = by_kind.get("forbidden", {}).get("word")
    filler = [word for word in _FILLER if word != forbidden]
    length = by_kind.get("min_words", {}).get("count", 8)
    body = [
        filler[index % len(filler)] for index in range(min(length, by_kind.get("max_words", {"count": 60})["count"]))
    ]
    if "keyword" in by_kind:
        body.insert(0, by_kind["keyword"]["word"])
    text = " ".join(body)
    if "bullets" in by_kind:
        text = "\n".join([f"- {text}", *["- people talk"] * (by_kind["bullets"]["count"] - 1)])
    if "paragraphs" in by_kind:
        text = "\n\n".join([text, *["people talk"] * (by_kind["paragraphs"]["count"] - 1)])
    if "uppercase" in by_kind:
        text = text.upper()
    if "starts_with" in by_kind:
        text = f"{by_kind['starts_with']['phrase']} {text}"
    return f"{text} {by_kind['ends_with']['phrase']}" if "ends_with" in by_kind else text


@grader
def verify_ifeval(text: str, problem: dict[str, Any], partial: bool = False) -> Grade:
    """1 if all constraints are met; with `partial`, else the share of those that are."""
    answer = after_thinking(text)
    if not answer.strip():
        return Grade(0.0, "no_answer")
    met = [follows(answer, each["kind"], each) for each in problem["constraints"]]
    share = sum(met) / len(met)
    details = {"constraints_met": share}
    if all(met):
        return Grade(1.0, "correct", details)
    return Grade(share if partial else 0.0, "wrong", details)


def validate(problem: dict[str, Any]) -> float | None:
    """Return the score of the gold answer; None where there is none."""
    gold = gold_answer(problem)
    return None if gold is None else verify_ifeval(gold, problem).score


async def generate_ifeval_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for a text and count the constraints that it meets; `custom.partial_score` gives credit for some."""
    partial = bool(cfg.custom.get("partial_score", False))
    return await answer_once(cfg, llm, problem, session, verify_ifeval, task=question(problem), partial=partial)
