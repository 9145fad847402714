"""Shapes of public data sets: where their rows keep what a domain needs, and the names by which they are known.

A shape maps the fields of a domain to paths in a row. A path is the name of a field, or goes into nested fields, lists
(by number) and JSON texts with dots; `|` separates alternatives. A field that ends in `?` may be missing. The first
shape of a domain that fits a row is used; with a user's own map (`fields`) the first one that has all fields of the
map, whose paths come before its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Row = dict[str, Any]
MISSING = object()


class Shape(NamedTuple):
    """One shape: whose rows have it, and the path of each field of the domain."""

    of: str
    fields: dict[str, str]


SHAPES: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
    {
        "math": (
            Shape("own rows", {"task": "task", "answer": "answer|final_answer", "difficulty?": "difficulty"}),
            Shape("own rows", {"task": "task", "solution": "solution", "difficulty?": "difficulty"}),
            Shape("Open-Reasoner-Zero", {"task": "0.value", "answer": "1.ground_truth.value"}),
            Shape("DAPO, Eurus, verl", {"task": "prompt", "answer": "reward_model.ground_truth"}),
            Shape(
                "GSM8K, MATH-500, AIME, AMC, DeepScaleR, NuminaMath-1.5",
                {
                    "task": "problem|question|Problem|Question|prompt",
                    "answer": "answer|final_answer|Answer",
                    "level?": "level",
                },
            ),
            Shape(
                "MATH, NuminaMath-CoT, GPQA",
                {"task": "problem|question|Problem|prompt", "solution": "solution|Solution", "level?": "level"},
            ),
            Shape("chats with an answer", {"task": "messages|conversations", "answer": "answer|ground_truth|label"}),
            Shape("chats", {"task": "messages|conversations", "solution": "messages|conversations"}),
        ),
        "coding": (
            Shape(
                "own rows",
                {
                    "task": "task",
                    "tests": "tests",
                    "function?": "function",
                    "setup?": "setup",
                    "solution?": "solution",
                    "difficulty?": "difficulty",
                },
            ),
            Shape(
                "HumanEval",
                {"task": "prompt", "tests": "test", "function": "entry_point", "solution?": "canonical_solution"},
            ),
            Shape(
                "MBPP",
                {
                    "task": "text|prompt",
                    "tests": "test_list",
                    "setup?": "test_setup_code|test_imports",
                    "solution?": "code",
                },
            ),
            Shape(
                "LiveCodeBench",
                {
                    "task": "question_content",
                    "tests": "public_test_cases",
                    "hidden?": "private_test_cases",
                    "function?": "metadata.func_name",
                    "starter?": "starter_code",
                },
            ),
            Shape("INTELLECT-3", {"task": "question", "tests": "info.tests"}),
            Shape(
                "TACO, APPS",
                {
                    "task": "question|problem",
                    "tests": "input_output",
                    "starter?": "starter_code",
                    "solution?": "solutions.0",
                },
            ),
            Shape("verl", {"task": "prompt", "tests": "reward_model.ground_truth"}),
        ),
        "fn_calling": (
            Shape("own rows", {"task": "task", "tools": "tools", "expected": "expected", "difficulty?": "difficulty"}),
            Shape("xLAM", {"task": "query", "tools": "tools", "expected": "answers"}),
            Shape("BFCL", {"task": "question", "tools": "function", "expected": "ground_truth"}),
            Shape("chats with tool calls", {"task": "messages", "tools": "tools", "expected": "messages"}),
        ),
        "ifeval": (
            Shape(
                "own rows",
                {
                    "task": "task|prompt",
                    "constraints": "constraints",
                    "response?": "response",
                    "difficulty?": "difficulty",
                },
            ),
            Shape("IFEval", {"task": "prompt", "ids": "instruction_id_list", "arguments?": "kwargs"}),
            Shape("IF_multi_constraints", {"task": "messages", "checks": "ground_truth"}),
        ),
    }
)

# Data sets whose repository has a program instead of data that the package `datasets` would find by itself.
_LIVECODEBENCH = "hf://datasets/livecodebench/code_generation_lite"
_BFCL = "hf://datasets/gorilla-llm/Berkeley-Function-Calling-Leaderboard"
#: Data sets by name, for each domain; written as a user may write them.
KNOWN: Mapping[str, Mapping[str, str | dict[str, Any]]] = MappingProxyType(
    {
        "math": {
            "gsm8k_train": "openai/gsm8k:main:train",
            "gsm8k_test": "openai/gsm8k:main:test",
            "math_train": "DigitalLearningGmbH/MATH-lighteval:train",
            "math_test": "DigitalLearningGmbH/MATH-lighteval:test",
            "math_500": "HuggingFaceH4/MATH-500:test",
            "math500": "HuggingFaceH4/MATH-500:test",
            "math_simplerl_train": "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/refs/heads/v0/train/data/"
            "math_level3to5_data_processed_with_qwen_prompt.json",
            "omni_math_500": "reliable-agents/Omni-MATH-500:test",
            **{
                name: {"path": "AI-MO/aimo-validation-aime", "filter": {"url": {"contains": name[5:9]}}}
                for name in ("aime_2022", "aime_2022_original", "aime_2023", "aime_2023_original")
            },
            "aime_2024": "HuggingFaceH4/aime_2024:train",
            "aime_2024_original": "HuggingFaceH4/aime_2024:train",
            "aime_2025": "MathArena/aime_2025:train",
            "aime_2025_original": "MathArena/aime_2025:train",
            **{
                name: {"path": "AI-MO/aimo-validation-amc", "filter": {"url": {"contains": name[4:8]}}}
                for name in ("amc_2022", "amc_2022_original", "amc_2023", "amc_2023_original")
            },
            "open_reasoner_zero_57k": "Open-Reasoner-Zero/orz_math_57k_collection:train",
            "open_reasoner_zero_extended_72k": "Open-Reasoner-Zero/orz_math_72k_collection_extended:train",
            "open_reasoner_zero_hard_13k": "Open-Reasoner-Zero/orz_math_13k_collection_hard:train",
            "open_reasoner_zero": "Open-Reasoner-Zero/orz_math_57k_collection:train",
            "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset:train",
            "deepscaler_preview": "agentica-org/DeepScaleR-Preview-Dataset:train",
            # The processed one: the original has every problem about 100 times.
            "dapo_17k": "open-r1/DAPO-Math-17k-Processed:all:train",
            "numina_math_cot": "AI-MO/NuminaMath-CoT:train",
            "numina_math_1_5": {
                "path": "AI-MO/NuminaMath-1.5",
                "filter": {"answer": {"not": ["proof", "notfound", ""]}},
            },
            "open_r1_math_220k": "open-r1/OpenR1-Math-220k:default:train",
            "nemotron_cascade_math": "nvidia/Nemotron-Cascade-RL-Math:train",
            "limo": "GAIR/LIMO:train",
            "gpqa_main": "hendrydong/gpqa_main:test",
            "gpqa_diamond": "hendrydong/gpqa_diamond:test",
            "eurus_train": {"path": "PRIME-RL/Eurus-2-RL-Data", "filter": {"ability": "math"}},
            "eurus_validation": {
                "path": "PRIME-RL/Eurus-2-RL-Data",
                "split": "validation",
                "filter": {"ability": "math"},
            },
        },
        "coding": {
            "mbpp": "google-research-datasets/mbpp:full:train",
            "mbpp_test": "google-research-datasets/mbpp:full:test",
            "mbpp_sanitized": "google-research-datasets/mbpp:sanitized:test",
            "humaneval": "openai/openai_humaneval:test",
            "livecodebench": f"{_LIVECODEBENCH}/test*.jsonl",
            "livecodebench_v5": f"{_LIVECODEBENCH}/test5.jsonl",
            "livecodebench_v6": f"{_LIVECODEBENCH}/test6.jsonl",
            "apps": "hf://datasets/codeparrot/apps/train.jsonl",
            "apps_test": "hf://datasets/codeparrot/apps/test.jsonl",
            "taco": "hf://datasets/BAAI/TACO/train/data-*.arrow",
            "taco_test": "hf://datasets/BAAI/TACO/test/data-*.arrow",
            "intellect_3": "PrimeIntellect/INTELLECT-3-RL:code:train",
        },
        "ifeval": {
            "google_ifeval": "google/IFEval:train",
            # Of its kinds of constraints, those of IFEval are checked; rows with others are left out.
            "ifeval": "allenai/IF_multi_constraints_upto5:train[:-550]",
            "ifeval_train": "allenai/IF_multi_constraints_upto5:train[:-550]",
            "ifeval_test": "allenai/IF_multi_constraints_upto5:train[-550:]",
        },
        "fn_calling": {
            "xlam_60k": "Salesforce/xlam-function-calling-60k:train",
            **{
                f"bfcl_{kind}": {
                    "path": f"{_BFCL}/BFCL_v3_{kind}.json",
                    "answers": f"{_BFCL}/possible_answer/BFCL_v3_{kind}.json",
                }
                for kind in ("simple", "multiple", "parallel", "parallel_multiple")
            },
        },
    }
)


def lookup(row: Any, path: str) -> Any:
    """Return the value at the first of the paths in `path` that the row has; `MISSING` if it has none."""
    for alternative in path.split("|"):
        if (value := _at(row, alternative)) is not MISSING:
            return value
    return MISSING


def _at(value: Any, path: str) -> Any:
    if isinstance(value, dict) and path in value:  # its name may have a dot
        return value[path]
    name, dot, rest = path.partition(".")
    if isinstance(value, str):
        value = from_json(value)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        found = value[int(name)]
    elif isinstance(value, dict) and name in value:
        found = value[name]
    else:
        return MISSING
    return _at(found, rest) if dot else found


def from_json(value: Any) -> Any:
    """Return the value of a text that is JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def fit(row: Row, domain: str, own: Mapping[str, str] = MappingProxyType({})) -> Row | None:
    """Return the values of the domain's fields in the first shape that fits, by the names of the fields.

    Args:
        own: a user's map; a shape fits if it has all of its fields and the row has all of its paths.
    """
    for shape in SHAPES[domain]:
        paths = {field.removesuffix("?"): path for field, path in shape.fields.items()}
        if not own.keys() <= paths.keys():
            continue
        values = {field: lookup(row, path) for field, path in {**paths, **own}.items()}
        lacking = {field for field, value in values.items() if value is MISSING}
        if all(f"{field}?" in shape.fields and field not in own for field in lacking):
            return {field: value for field, value in values.items() if field not in lacking}
    return None


def map_of(domain: str) -> str:
    """The map that a user has to fill in for rows of an unknown shape."""
    own = [field for field in SHAPES[domain][0].fields if not field.endswith("?")]
    return f"{{{', '.join(f'{field}: FIELD' for field in own)}}}"


def field_names(row: Row, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a row that hold no further fields, in order."""
    for name, value in row.items():
        if isinstance(value, dict) and value and prefix.count(".") < 3:
            yield from field_names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def has_several_questions(value: Any) -> bool:
    """Whether a chat has several turns of the user before its end or its first tool calls: it is not one task."""
    parts = value if isinstance(value, list) else []
    turns = [turn for part in parts for turn in (part if isinstance(part, list) else [part]) if isinstance(turn, dict)]
    until = itertools.takewhile(lambda turn: not turn.get("tool_calls"), turns)
    return sum(turn.get("role", turn.get("from")) in _ROLES["user"] for turn in until) > 1


_ROLES = MappingProxyType({"user": ("user", "human"), "assistant": ("assistant", "gpt", "model")})


def chat_text(value: Any, role: str) -> str | None:
    """Return the text of the first turn of `role` (user or assistant) in a chat, or a text as it is; None: neither.

    Turns have `role` and `content`, or `from` (human, gpt) and `value`. A list of chats stands for its first one.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list):
        return None
    for turn in value:
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in _ROLES[role]:
            text = turn.get("content", turn.get("value"))
            return text if isinstance(text, str) else None
    return None
