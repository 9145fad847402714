"""Parses tool calls in a model's text. Never raises: a call that cannot be parsed is an entry in `errors`.

Calls inside `<think>` do not count. Formats: Qwen and Hermes (`<tool_call>{json}</tool_call>`), Llama 3
(`<|python_tag|>{json}`, `<function=name>{json}</function>`, bare JSON) and OpenAI's JSON (`{"tool_calls": [...]}`).
Time is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipelinerl.llm.tokens import THOUGHT, after_thinking

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_ENDS_OF_MESSAGE = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>")
_FUNCTION = re.compile(r"<function=([^<>\s]{1,256})>")
_BETWEEN = re.compile(r"[\s;,]*")
_FUNCTION_CLOSE = "</function>"
_BUILT_IN = re.compile(r'\s*([A-Za-z_]\w{0,63})\.call\(\s*(?:([A-Za-z_]\w{0,63})\s*=\s*"((?:[^"\\]|\\.)*)")?\s*\)\s*')
_MAX_CALLS = 128
# Parsed pieces, including broken ones: bounds the work for a text with a million opening tags.
_MAX_PIECES = 512
_SHOWN_CHARACTERS = 120
_DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse(name))


@dataclass(slots=True)
class ParsedToolCalls:
    """`content` is the text around the calls; `calls` are in OpenAI's format; `errors` says what is malformed."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def parse_tool_calls(text: str, *, id_prefix: str = "call") -> ParsedToolCalls:
    """Return the tool calls in `text`, in order; a broken call does not affect its siblings.

    Each call is `{"id", "type": "function", "function": {"name", "arguments"}}`, where `arguments` is the text of a
    JSON object. Ids are `{id_prefix}_{index}`.
    """
    found = ParsedToolCalls(content="")
    stated = after_thinking(text)
    begin = text.rfind(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
    before, text, after = text[:begin], stated, text[begin + len(stated) :]
    if _OPEN in text:
        found.content = _read_tagged(text, found)
    elif _PYTHON_TAG in text:
        found.content, _, rest = text.partition(_PYTHON_TAG)
        _read_python_tag(_without_end(rest), found)
    elif _FUNCTION.search(text):
        found.content = _read_functions(text, found)
    else:
        found.content = _read_bare(text, found)
    found.content = f"{before}{found.content}{after}".strip()
    found.calls = [{"id": f"{id_prefix}_{index}", **call} for index, call in enumerate(found.calls)]
    return found


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as a dict; empty if they are not a JSON object."""
    function = call.get("function")
    given = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(given, dict):
        return given
    value = _loads(given) if isinstance(given, str) else None
    return value if isinstance(value, dict) else {}


def _read_tagged(text: str, found: ParsedToolCalls) -> str:
    """Qwen, Hermes: each call, or a list of them, between tags; the last closing tag may be missing."""
    outside, *pieces = text.split(_OPEN, _MAX_PIECES)
    content = [outside]
    for piece in pieces:
        body, closed, after = piece.partition(_CLOSE)
        _add_all(_loads(body if closed else _without_end(body)) or None, body, found)
        content.append(after)
    return "".join(content)


def _read_python_tag(text: str, found: ParsedToolCalls) -> None:
    """Llama: JSON objects with `;` or nothing between them, or `tool.call(name="value")` of the built-in tools."""
    built_in = _BUILT_IN.fullmatch(text)
    if built_in:
        tool, key, value = built_in.groups()
        _add({"name": tool, "arguments": {key: value} if key else {}}, text, found)
        return
    if not text.lstrip().startswith(("{", "[")):
        # Anything else is code for the Python tool.
        _add({"name": "python", "arguments": {"code": text}} if text.strip() else None, text, found)
        return
    for value, shown in _json_values(text):
        _add_all(value, shown, found)


def _read_functions(text: str, found: ParsedToolCalls) -> str:
    """Llama's own tags: `<function=name>{json}</function>`."""
    content = []
    position = 0
    for match in islice(_FUNCTION.finditer(text), _MAX_PIECES):
        if match.start() < position:
            continue
        content.append(text[position : match.start()])
        end = text.find(_FUNCTION_CLOSE, match.end())
        body = text[match.end() :] if end < 0 else text[match.end() : end]
        position = len(text) if end < 0 else end + len(_FUNCTION_CLOSE)
        arguments = _loads(_without_end(body)) if body.strip() else {}
        call = {"name": match.group(1), "arguments": arguments} if isinstance(arguments, dict) else None
        _add(call, body, found)
    content.append(text[position:])
    return "".join(content)


def _read_bare(text: str, found: ParsedToolCalls) -> str:
    """Bare JSON: the whole text is calls; anything else is an ordinary answer."""
    stripped = _without_end(text).strip()
    if not stripped.startswith(("{", "[")):
        return text
    value = _loads(stripped)
    if value is None and ";" in stripped:
        values = [each for each, _ in _json_values(stripped)]
        value = values if values and all(_looks_like_call(each) for each in values) else None
    calls = value.get("tool_calls") if isinstance(value, dict) and "tool_calls" in value else value
    entries = calls if isinstance(calls, list) else [calls]
    if not any(_looks_like_call(entry) for entry in entries):
        return text
    _add_all(entries, stripped, found)
    content = value.get("content") if isinstance(value, dict) else None
    return content if isinstance(content, str) else ""


def _looks_like_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    inner = value.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else value
    return isinstance(function.get("name"), str) and ("arguments" in function or "parameters" in function)


def _add_all(value: Any, shown: str, found: ParsedToolCalls) -> None:
    for entry in value if isinstance(value, list) else [value]:
        _add(entry, shown, found)


def _add(value: Any, shown: str, found: ParsedToolCalls) -> None:
    """Add one call, or an error."""
    call = _as_call(value)
    if call is None:
        found.errors.append(f"not a tool call: {shown[:_SHOWN_CHARACTERS].strip()!r}")
    elif len(found.calls) >= _MAX_CALLS:
        found.errors.append(f"more than {_MAX_CALLS} tool calls")
    else:
        name, arguments = call
        found.calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})


def _as_call(value: Any) -> tuple[str, str] | None:
    """Return name and arguments (text of a JSON object) of a value with the shape of a call."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else value
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if arguments is None and "arguments" not in function:
        arguments = {}
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # A lone surrogate is valid in a Python string but not in UTF-8.
        f"{name}{text}".encode()
    except (ValueError, RecursionError):
        return None
    return name.strip(), text


def _json_values(text: str) -> Iterator[tuple[Any, str]]:
    """Yield the JSON values that follow each other in `text`; (None, rest) where one cannot be parsed."""
    position = 0
    for _ in range(_MAX_PIECES):
        between = _BETWEEN.match(text, position)
        position = between.end() if between else position
        if position == len(text):
            return
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            yield None, text[position : position + _SHOWN_CHARACTERS]
            # The next call after a broken one starts after a semicolon.
            following = text.find(";", position)
            if following < 0:
                return
            position = following + 1
            continue
        yield value, text[position : min(end, position + _SHOWN_CHARACTERS)]
        position = end


def _loads(text: str) -> Any:
    """Return the JSON value, or None for anything else."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without_end(text: str) -> str:
    """Remove the special token that ended the message, if the text still has it."""
    for end in _ENDS_OF_MESSAGE:
        text = text.removesuffix(end)
    return text
