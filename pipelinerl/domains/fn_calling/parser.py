"""Reads function calls out of a model's text, whatever its format, and never raises. Pure; linear in the text.

Called by the grader. Formats: `<tool_call>{...}</tool_call>` (Qwen, Hermes), `<|python_tag|>{...}` and a bare JSON
object or list (Llama), `<function=name>{...}</function>` (Llama), fenced JSON. A damaged call is counted and skipped;
those beside it are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

MAX_CALLS = 64
MAX_CHARACTERS = 200_000


@dataclass(frozen=True)
class FunctionCall:
    """A call with plain arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedCalls:
    """The calls in a text, in order, and how many parts looked like calls but could not be read."""

    calls: list[FunctionCall]
    num_damaged: int


def parse_calls(text: str) -> ParsedCalls:
    """Return the calls in `text`."""
    text = text[:MAX_CHARACTERS]
    calls: list[FunctionCall] = []
    damaged = 0
    for part, name in _parts(text)[:MAX_CALLS]:
        found = _read(part, name)
        calls += found
        damaged += not found
    return ParsedCalls(calls[:MAX_CALLS], damaged)


def _parts(text: str) -> list[tuple[str, str | None]]:
    """Return the pieces of text that should be calls, with the function's name where it stands outside of the JSON."""
    if "<tool_call>" in text:
        return [(piece.partition("</tool_call>")[0], None) for piece in text.split("<tool_call>")[1:]]
    if "<function=" in text:
        parts: list[tuple[str, str | None]] = []
        for piece in text.split("<function=")[1:]:
            name, _, rest = piece.partition(">")
            parts.append((rest.partition("</function>")[0], name.strip()))
        return parts
    if "<|python_tag|>" in text:
        return [(line, None) for line in text.partition("<|python_tag|>")[2].split(";") if line.strip()]
    if "```" in text:
        return [(piece.removeprefix("json"), None) for piece in text.split("```")[1::2]]
    bare = text.strip()
    return [(bare, None)] if bare.startswith(("{", "[")) else []


def _read(part: str, name: str | None) -> list[FunctionCall]:
    try:
        value = msgspec.json.decode(part.strip().encode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    if name is not None:
        return [FunctionCall(name, value)] if isinstance(value, dict) else []
    entries = value if isinstance(value, list) else [value]
    found = [_call(entry) for entry in entries]
    return [call for call in found if call is not None]


def _call(entry: Any) -> FunctionCall | None:
    if not isinstance(entry, dict):
        return None
    inner = entry.get("function")
    if isinstance(inner, dict):  # OpenAI's form
        entry = inner
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode("utf-8", "replace"))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
    name = entry.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return FunctionCall(name, arguments)
