"""T7: tool calls are read from text without ever raising, and valid siblings of a broken call survive."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.llm import parse_tool_calls

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
Calls = list[tuple[str, dict[str, Any]]]
ONE: Calls = [("add", {"a": 1, "b": 2})]


def calls_of(text: str) -> Calls:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parse_tool_calls(text).calls
    ]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", ONE),
        (f"Let me add.<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", ONE * 2),
        (f"<tool_call>\n{ADD}", ONE),
        (f"<tool_call>[{ADD}, {ADD}]</tool_call>", ONE * 2),
        (f"<tool_call>\n{ADD}<|im_end|>", ONE),
        ('<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', ONE),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
         [*ONE, ("now", {})]),
        ('<|python_tag|>brave_search.call(query="cats")', [("brave_search", {"query": "cats"})]),
        ("<|python_tag|>print(1)", [("python", {"code": "print(1)"})]),
        ('<function=add>{"a": 1, "b": 2}</function>', ONE),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ONE),
        (f'{ADD}; {ADD}', ONE * 2),
        (f"[{ADD}, {ADD}]", ONE * 2),
        ('{"tool_calls": [{"id": "x", "type": "function", "function": ' + ADD + "}]}",
         ONE),
        ("no call at all", []),
        ('{"answer": 3}', []),
        ("", []),
    ],
)  # fmt: skip
def test_formats(text: str, calls: Calls) -> None:
    assert calls_of(text) == calls


@pytest.mark.parametrize(
    ("text", "num_errors"),
    [
        (f'<tool_call>{{"name": </tool_call><tool_call>{ADD}</tool_call><tool_call>nonsense</tool_call>', 2),
        (f'<tool_call>[1, 2]</tool_call><tool_call>{ADD}</tool_call><tool_call>{{"name": "cut', 3),
        (f'<tool_call>[]</tool_call><tool_call>{ADD}</tool_call>', 1),
        (f'<|python_tag|>{{"name": broken}}; {ADD}', 1),
        (f'<tool_call>{{"name": "x", "arguments": {{"v": NaN}}}}</tool_call><tool_call>{ADD}</tool_call>', 1),
        (f'<tool_call>{{"name": "\\ud800", "arguments": {{}}}}</tool_call><tool_call>{ADD}</tool_call>', 1),
        (f'<tool_call>{{"name": "", "arguments": {{}}}}</tool_call><tool_call>{ADD}</tool_call>', 1),
        (f'<tool_call>{{"name": 7, "arguments": {{}}}}</tool_call><tool_call>{ADD}</tool_call>', 1),
        ('<function=add>{"a": 1, "b": 2}</function><function=x>{"a": </function>', 1),
        (f"<tool_call>{'[' * 200_000}</tool_call><tool_call>{ADD}</tool_call>", 1),
        (f'<tool_call>{{"a": {"9" * 6000}}}</tool_call><tool_call>{ADD}</tool_call>', 1),
    ],
)  # fmt: skip
def test_t7_valid_siblings_survive(text: str, num_errors: int) -> None:
    assert calls_of(text) == ONE
    assert len(parse_tool_calls(text).errors) == num_errors


def test_content_is_what_stands_outside() -> None:
    found = parse_tool_calls(f"First.<tool_call>{ADD}</tool_call> Then.", id_prefix="c")
    assert found.content == "First. Then."
    assert found.calls[0]["id"] == "c_0"
    assert parse_tool_calls("I think <|python_tag|>{}").content == "I think"


def test_what_is_thought_is_no_call() -> None:
    call = f"<tool_call>{ADD}</tool_call>"
    thought = f"<think>I could use {call}, but no.</think>It is 4."
    found = parse_tool_calls(thought)
    assert not found.calls and found.content == thought
    assert not parse_tool_calls(f"<think>perhaps {call}").calls
    found = parse_tool_calls(f"<think>{call}?</think> Yes: {call}")
    assert len(found.calls) == 1 and found.content == f"<think>{call}?</think> Yes:"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_arguments_are_json(number: str) -> None:
    found = parse_tool_calls(f'<tool_call>{{"name": "f", "arguments": {{"x": [{number}]}}}}</tool_call>')
    assert not found.calls and len(found.errors) == 1


def test_the_number_of_calls_is_bounded() -> None:
    found = parse_tool_calls(f"<tool_call>{ADD}</tool_call>" * 200)
    assert len(found.calls) == 128 and len(found.errors) == 72


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "</tool_call>", "<tool_call>{", "<|python_tag|>", "<function=a>", "{", "[{", '{"name":', "a.call(",
     '\\"', "\x00", "\ud800", "{;", ";"],
)  # fmt: skip
def test_t7_a_megabyte_of_nonsense_takes_no_time_to_speak_of(piece: str) -> None:
    started = time.process_time()
    for start in ("", "<|python_tag|>", "<tool_call>", '{"name": "x", "arguments": ', "<|python_tag|>{"):
        parse_tool_calls(start + piece * (1_000_000 // len(piece)))
    # Of quadratic time it would be hours.
    assert time.process_time() - started < 60


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", ADD, "{", "}", "[", "]", '"', "name", ":", ",", ";", "<|python_tag|>",
             "<function=f>", "</function>", "\x00", "\ud800", "\\u0000", "1e999", "null", " ", "arguments"]
        ),
        max_size=30,
    )
)  # fmt: skip
def test_t7_nothing_raises(pieces: list[str]) -> None:
    found = parse_tool_calls("".join(pieces))
    for call in found.calls:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
