"""Tests of programs as public data sets have them, in the forms that the grader of `coding` runs.

A test is {"input", "output"} of a program, {"args", "expected"} of a function (or "accepted", a list of results that
are all right), or {"assert"}, code that runs after the program and must not raise.
"""

from __future__ import annotations

import base64
import json
import pickletools
import re
import zlib
from typing import Any

from pipelinerl.domains.data import Problem
from pipelinerl.domains.shapes import chat_text, from_json

Test = dict[str, Any]
_KEYS = (("input", "output"), ("args", "expected"), ("args", "accepted"))
#: What LeetCode has imported when a solution starts.
_LEETCODE_SETUP = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, comb, floor, gcd, inf, sqrt
from typing import *
"""


def coding_problem(values: dict[str, Any], max_tests: int | None = None) -> Problem | str:
    """Return the problem of a row's values, or why the row is left out.

    Args:
        values: `task` and `tests`; `hidden` (further tests), `function`, `starter` (code to begin with), `setup` (code
            that goes before the program), `solution`, `difficulty`.
        max_tests: so many tests at most, evenly spread.
    """
    task, function = chat_text(values["task"], "user"), values.get("function") or None
    if not task:
        return "without a text as the task"
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        return "with a function whose name is none"
    found = read_tests(values["tests"], function)
    if found is None:
        return "without tests of a known form"
    tests, function = found
    if values.get("hidden"):
        hidden = read_tests(_decoded(values["hidden"]), function)
        if hidden is None:
            return "with hidden tests that cannot be read"
        tests += hidden[0]
    if not tests:
        return "without a test"
    problem: Problem = {"task": task, "tests": _spread(tests, max_tests)}
    starter, setup = values.get("starter") or "", _lines(values.get("setup"))
    solution = values.get("solution")
    if "check(" in str(values["tests"]) and re.search(rf"^def {function}\(", task, re.MULTILINE):  # HumanEval
        before, _, head = task.rpartition(f"def {function}(")
        problem["task"] = f"Complete this Python function:\n```python\n{task.strip()}\n```"
        setup = f"{before}{setup}"
        solution = f"{before}def {function}({head}{solution}" if isinstance(solution, str) else None
    elif "assert" in tests[0]:
        checks = "\n".join(test["assert"] for test in tests[:_SHOWN])
        problem["task"] = f"{task}\n\nThe program has to pass these tests:\n```python\n{checks}\n```"
    elif isinstance(starter, str) and starter.strip():
        problem["task"] = f"{task}\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"
        setup = f"{_LEETCODE_SETUP}{setup}" if "class Solution" in starter else setup
    own: Problem = {"function": function, "setup": setup, "solution": solution if isinstance(solution, str) else None}
    difficulty = values.get("difficulty")
    own["difficulty"] = difficulty if isinstance(difficulty, int | float) else None
    return problem | {key: value for key, value in own.items() if value not in (None, "")}


_SHOWN = 3


def read_tests(given: Any, function: str | None) -> tuple[list[Test], str | None] | None:
    """Return the tests in a value, and the function that they call; None: they have no known form.

    Known are lists of tests as above, lists of `assert` lines (MBPP), a function `check(candidate)` (HumanEval), lists
    of {"input", "output"} with arguments as lines of JSON if there is a function (LiveCodeBench), and {"inputs",
    "outputs", "fn_name"} (TACO, APPS). All may be JSON texts.
    """
    given = from_json(given)
    if isinstance(given, str) and function and "def check(" in given:
        return [{"assert": f"{given}\n\ncheck({function})"}], function
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        function = given.get("fn_name") or function
        pairs = zip(given["inputs"], given["outputs"], strict=False)
        make = _of_call if function else _of_streams
        return [make(found, wanted) for found, wanted in pairs], function
    if not isinstance(given, list):
        return None
    tests: list[Test] = []
    for each in given:
        if isinstance(each, str) and "assert" in each:
            tests.append({"assert": each})
        elif not isinstance(each, dict) or not any(keys[0] in each and keys[1] in each for keys in _KEYS):
            return None
        elif "args" in each:
            tests.append({key: each[key] for key in ("args", "expected", "accepted") if key in each})
        elif function and each.get("testtype", "functional") == "functional":
            tests.append(_of_call(each["input"], each["output"]))
        else:
            tests.append(_of_streams(each["input"], each["output"]))
    needs_function = any("args" in test for test in tests)
    return None if needs_function and not function else (tests, function)


def _of_streams(given: Any, wanted: Any) -> Test:
    return {"input": _lines(given), "output": _lines(wanted)}


def _of_call(given: Any, wanted: Any) -> Test:
    """Arguments are a list, or a line of JSON for each. A result may stand in a list of its own (APPS)."""
    args = given if isinstance(given, list) else [from_json(line) for line in str(given).split("\n") if line.strip()]
    if isinstance(wanted, str) and not isinstance(given, list):
        return {"args": args, "expected": from_json(wanted)}
    if isinstance(wanted, list) and len(wanted) == 1:
        return {"args": args, "accepted": [wanted[0], wanted]}
    return {"args": args, "expected": wanted}


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _decoded(value: Any) -> Any:
    """Return tests that LiveCodeBench keeps as base64 of a compressed pickle of a JSON text.

    The pickle is only searched for its text; nothing in it is run.
    """
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return value
    try:
        content = zlib.decompress(base64.b64decode(value))
        text = next(argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str))
        return json.loads(text)
    except (ValueError, zlib.error, StopIteration):
        return None


def _spread(tests: list[Test], at_most: int | None) -> list[Test]:
    if at_most is None or len(tests) <= at_most:
        return tests
    return [tests[place * len(tests) // at_most] for place in range(at_most)]
