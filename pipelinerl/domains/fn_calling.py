"""Function calling: choose the functions and their arguments.

Problems are made here (`train`, `test`) or rows of a data set with `task`, `tools` and `expected`, a list of
{"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.domains.answers import same_value
from pipelinerl.domains.data_sets import load_data_sets
from pipelinerl.domains.shapes import chat_text, from_json
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.llm.tool_calls import ParsedToolCalls, arguments_of, parse_tool_calls
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.protocol import Grade, grader

Values = tuple[Any, ...]
_CITIES = ("Oslo", "Lima", "Quebec", "Nairobi", "Kyoto", "Porto", "Tallinn", "Hanoi")
_NAMES = ("Ada", "Bo", "Chen", "Dara", "Edin", "Farah")

# name -> (description, request in words, parameters with the values that they are drawn from)
CATALOG: Mapping[str, tuple[str, str, dict[str, Values]]] = MappingProxyType(
    {
        "get_weather": (
            "Weather of a city",
            "Tell me the weather in {city} in {unit}.",
            {"city": _CITIES, "unit": ("celsius", "fahrenheit")},
        ),
        "set_timer": ("Start a timer", "Set a timer of {minutes} minutes.", {"minutes": tuple(range(1, 120))}),
        "convert": (
            "Convert money",
            "Convert {amount} {source} to {target}.",
            {"amount": tuple(range(5, 500, 5)), "source": ("EUR", "USD"), "target": ("JPY", "GBP", "SEK")},
        ),
        "send_message": (
            "Send a text message",
            'Send the message "{text}" to {recipient}.',
            {"text": ("on my way", "call me", "happy birthday", "see you soon"), "recipient": _NAMES},
        ),
        "book_table": (
            "Book a table in a restaurant",
            "Book a table for {people} at {hour} o'clock in {city}.",
            {"people": tuple(range(1, 9)), "hour": tuple(range(17, 23)), "city": _CITIES},
        ),
        "switch_light": (
            "Switch a light on or off",
            "Switch the light in the {room} to {state}.",
            {"room": ("kitchen", "hall", "office", "garage"), "state": ("on", "off")},
        ),
        "find_train": (
            "Trains between two cities",
            "Find a train from {start} to {end}.",
            {"start": _CITIES[:4], "end": _CITIES[4:]},
        ),
    }
)


def tool_schema(name: str) -> dict[str, Any]:
    """Return the function in OpenAI's format."""
    description, _, parameters = CATALOG[name]
    properties = {
        key: {"type": "integer" if isinstance(values[0], int) else "string"} for key, values in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def draw_call(name: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a request in words and the arguments that answer it."""
    _, request, parameters = CATALOG[name]
    arguments = {key: rng.choice(values) for key, values in parameters.items()}
    return request.format(**arguments), arguments


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 1000,
    num_test: int = 100,
    max_calls: int = 2,
    num_tools: int = 4,
    seed: int = 0,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return problems made here, with 1 to `max_calls` calls among `num_tools` functions, and those of data sets.

    Args:
        fields, limit: see `load_data_sets`.

    Raises:
        DomainError: see `load_data_sets`.
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

    return load_data_sets("fn_calling", dataset_names, draw, (num_train, num_test), seed, _problem, fields, limit)


def _problem(values: dict[str, Any]) -> dict[str, Any] | str:
    task, tools, expected = chat_text(values["task"], "user"), from_json(values["tools"]), from_json(values["expected"])
    if not task:
        return "without a text as the task"
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not tools or not all(_is_tool(tool) for tool in tools):
        return "without a list of tools"
    expected = [expected] if isinstance(expected, dict) else expected
    if isinstance(expected, list) and any(isinstance(each, dict) and "role" in each for each in expected):
        calls_of = (each.get("tool_calls") for each in expected if isinstance(each, dict))
        expected = next((calls for calls in calls_of if calls), None)
    calls = [_expected_call(each) for each in expected] if isinstance(expected, list) else [None]
    if None in calls:
        return "without expected calls"
    difficulty = {"difficulty": values["difficulty"]} if isinstance(values.get("difficulty"), int | float) else {}
    return {"task": task, "tools": [_as_tool(tool) for tool in tools], "expected": calls, **difficulty}


def _expected_call(given: Any) -> dict[str, Any] | None:
    """Return {"name", "arguments"}, or {"name", "accepted"} with lists of values that are all right (BFCL)."""
    given = from_json(given)
    call = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(call, dict):
        return None
    if isinstance(call.get("name"), str):
        arguments = from_json(call.get("arguments", {}))
        return {"name": call["name"], "arguments": arguments} if isinstance(arguments, dict) else None
    if len(call) != 1:
        return None
    ((name, accepted),) = call.items()
    is_right = isinstance(accepted, dict) and all(isinstance(values, list) for values in accepted.values())
    return {"name": name, "accepted": accepted} if is_right else None


#: Names of Python types that some data sets have instead of those of JSON schemas.
_TYPES = MappingProxyType(
    {"dict": "object", "list": "array", "tuple": "array", "float": "number", "int": "integer", "str": "string"}
    | {"bool": "boolean", "any": "string"}
)


def _is_tool(given: Any) -> bool:
    function = given.get("function", given) if isinstance(given, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _as_tool(given: dict[str, Any]) -> dict[str, Any]:
    """Return a function in OpenAI's format."""
    function = given.get("function", given)
    parameters = from_json(function.get("parameters") or {})
    if isinstance(parameters, dict) and "properties" not in parameters:  # only the parameters, by name (xLAM)
        properties = {name: each for name, each in parameters.items() if isinstance(each, dict)}
        required = [
            name
            for name, each in properties.items()
            if "default" not in each and "optional" not in str(each.get("type"))
        ]
        parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {**function, "parameters": _as_schema(parameters)}}


def _as_schema(schema: Any, is_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_as_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _as_schema(value, key == "properties" and not is_names) for key, value in schema.items()}
    kind = schema.get("type")
    if not is_names and isinstance(kind, str):
        word = kind.partition(",")[0].partition("[")[0].strip()
        schema["type"] = _TYPES.get(word.lower(), word)
    return schema


def system_prompt(problem: dict[str, Any]) -> str:
    """Return the functions and the format of calls in words."""
    tools = "\n".join(msgspec.json.encode(tool).decode() for tool in problem["tools"])
    return (
        f"You can call these functions:\n{tools}\nAnswer with one block for each call and nothing else:\n"
        '<tool_call>{"name": "function", "arguments": {"parameter": "value"}}</tool_call>'
    )


def gold_answer(problem: dict[str, Any]) -> str:
    """Return a right output."""
    calls = [
        msgspec.json.encode({"name": call["name"], "arguments": _gold_arguments(call)}).decode()
        for call in problem["expected"]
    ]
    if not calls:
        return "None of the functions fits."
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)


def _gold_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return call["arguments"] if "arguments" in call else _first_accepted(call["accepted"])


def _first_accepted(accepted: dict[str, list[Any]]) -> dict[str, Any]:
    chosen = {name: values[0] for name, values in accepted.items() if values and values[0] != ""}
    return {
        name: _first_accepted(value) if isinstance(value, dict) and _is_nested(value) else value
        for name, value in chosen.items()
    }


def _is_nested(value: dict[str, Any]) -> bool:
    return all(isinstance(each, list) for each in value.values())


MAX_CHARACTERS = 200_000
_MAX_BLOCKS = 64
Call = tuple[str, dict[str, Any]]


def parse_calls(text: str) -> tuple[list[Call], int]:
    """Return the calls in `text` (name, arguments), and how many parts looked like calls but could not be read.

    Besides the formats of `llm.tool_calls`, calls may stand in blocks between three backticks. JSON there, and a text
    that is JSON, must be calls here, so they need no arguments.
    """
    text = text[:MAX_CHARACTERS]
    found = [parse_tool_calls(text)]
    if not found[0].calls and not found[0].errors:
        blocks = [text] if text.lstrip().startswith(("{", "[")) else text.split("```")[1 : 2 * _MAX_BLOCKS : 2]
        found = [_parse_block(block.removeprefix("json")) for block in blocks]
    calls = [call for each in found for call in each.calls]
    num_damaged = sum(len(each.errors) for each in found)
    return [(call["function"]["name"], arguments_of(call)) for call in calls], num_damaged


def _parse_block(block: str) -> ParsedToolCalls:
    found = parse_tool_calls(block)
    return found if found.calls or found.errors else parse_tool_calls(f"<tool_call>{block}</tool_call>")


@grader
def verify_fn_calling(text: str, problem: dict[str, Any], partial: bool = False) -> Grade:
    """1 if exactly the expected calls are made, in any order; with `partial`, else the share of right calls."""
    calls, num_damaged = parse_calls(after_thinking(text))
    missing = list(problem["expected"])
    if not calls and (missing or num_damaged or not text.strip()):
        return Grade(0.0, "unparsable" if num_damaged else "no_answer")
    num_expected = len(missing)
    for name, arguments in calls:
        for index, call in enumerate(missing):
            if name == call["name"] and _is_right(arguments, call):
                del missing[index]
                break
    found = num_expected - len(missing)
    extra = len(calls) - found + num_damaged
    details = {"calls_right": found / max(num_expected, 1), "calls_extra": float(extra)}
    if not missing and not extra:
        return Grade(1.0, "correct", details)
    return Grade(found / max(num_expected, len(calls)) if partial else 0.0, "wrong", details)


def _is_right(arguments: dict[str, Any], call: dict[str, Any]) -> bool:
    if "accepted" in call:
        return _are_accepted(arguments, call["accepted"])
    return same_value(arguments, call["arguments"], strip=True)


def _are_accepted(arguments: dict[str, Any], accepted: dict[str, list[Any]]) -> bool:
    """Whether each argument is one of those that are right; "" among these says that it may be missing."""
    if not arguments.keys() <= accepted.keys():
        return False
    return all(
        any(_is_accepted(arguments[name], value) for value in values) if name in arguments else "" in values
        for name, values in accepted.items()
    )


def _is_accepted(found: Any, value: Any) -> bool:
    if isinstance(found, str) and isinstance(value, str):
        return _SIGNS.sub("", found.lower()) == _SIGNS.sub("", value.lower())
    if isinstance(found, dict) and isinstance(value, dict) and _is_nested(value):
        return _are_accepted(found, value)
    if isinstance(found, list) and isinstance(value, list):
        return len(found) == len(value) and all(map(_is_accepted, found, value))
    return same_value(found, value, strip=True)


# What BFCL leaves out of texts before it compares them.
_SIGNS = re.compile(r"[ ,./\-_*^]")


def validate(problem: dict[str, Any]) -> float:
    """Return the score of the expected calls."""
    return verify_fn_calling(gold_answer(problem), problem).score


async def generate_fn_calling_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for calls and compare them.

    `custom.native_tools`: the model's chat template describes the functions, instead of a system prompt.
    `custom.partial_score`: credit for some of the calls.
    """
    native = bool(cfg.custom.get("native_tools", False))
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        verify_fn_calling,
        task=problem["task"],
        system_prompt=None if native else system_prompt(problem),
        tools=problem["tools"] if native else None,
        partial=bool(cfg.custom.get("partial_score", False)),
    )
