"""Public data sets of programs: their own solutions pass their tests in the sandbox, and other programs fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from fakes.data_set_rows import CODING

from pipelinerl.domains import coding
from pipelinerl.errors import DomainError
from pipelinerl.sandbox.programs import SandboxUnavailableError, check_sandbox

# Ends before any test, and a function that is never right.
WRONG = ("import sys\nsys.exit(0)", "def {0}(*xs):\n    return [None]\n\nclass Solution:\n    {0} = {0}\n")


def load(name: str, monkeypatch: pytest.MonkeyPatch, **params: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **words: CODING[name][0])
    return coding.load_problems([name], **params)


@pytest.mark.parametrize("name", CODING)
def test_solutions_pass_and_other_programs_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error)[:200])
    problems = load(name, monkeypatch)
    assert len(problems) == len(CODING[name][0])
    for problem, right in zip(problems, CODING[name][1], strict=True):
        if right is None:
            assert coding.validate(problem) == 1.0
        else:
            assert coding.gold_answer(problem) is None
            assert coding.verify_coding(f"```python\n{right}\n```", problem).score == 1.0
        for wrong in WRONG:
            program = wrong.format(problem.get("function", "in_order"))
            assert coding.verify_coding(f"```python\n{program}\n```", problem).score == 0.0


def test_what_the_model_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = load("mbpp", monkeypatch)
    assert "assert in_order(2, 1) == (1, 2)" in first["task"] and second["setup"] == "import math"
    (halves,) = load("humaneval", monkeypatch)
    assert "```python\nfrom typing import List" in halves["task"] and "def half(" in halves["setup"]
    streams, call = load("livecodebench", monkeypatch)
    assert streams["tests"] == [{"input": "2\n", "output": "4\n"}, {"input": "-3\n", "output": "-6\n"}]
    assert call["tests"] == [{"args": [[1, 3, 2]], "expected": 3}, {"args": [[-1]], "expected": -1}]
    assert "class Solution:" in call["task"] and call["function"] == "largest"


def test_tests_are_spread_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"task": "t", "tests": [{"input": str(n), "output": str(n)} for n in range(10)]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **words: rows)
    for limit, kept in ((3, "036"), (None, "0123456789"), (20, "0123456789")):
        (problem,) = coding.load_problems(["own/rows:train"], max_tests=limit)
        assert "".join(test["input"] for test in problem["tests"]) == kept


@pytest.mark.parametrize("tests", [[], "no tests", [{"args": [1], "expected": 1}], [1], {"inputs": []}])
def test_rows_whose_tests_cannot_be_run(tests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **words: [{"task": "t", "tests": tests}])
    with pytest.raises(DomainError, match="without"):
        coding.load_problems(["own/rows:train"])


def test_hidden_tests_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The public ones alone would grade wrong programs as right."""
    (row, *_), _ = CODING["livecodebench"]
    rows = [{**row, "private_test_cases": hidden} for hidden in ("AAAA", "[1", '["a"]', "", None, "[]")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **words: rows)
    assert [len(each["tests"]) for each in coding.load_problems(["livecodebench"])] == [1, 1, 1]
    assert "3 with hidden tests" in caplog.text


@pytest.mark.parametrize(
    "head",
    [
        "",
        "from __future__ import annotations\n",
        '"""Halves."""\n# and\nfrom __future__ import (\n    annotations,\n)\n\nfrom __future__ import division\n',
        "from __future__ import annotations, \\\n    division  # both\n",
    ],
)
def test_setup_goes_behind_what_has_to_come_first(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []

    def tested(program: str, *rest: Any) -> Any:
        run.append(program)
        return SimpleNamespace(ending="finished"), True

    monkeypatch.setattr(coding, "_tested", tested)
    problem = {"tests": [{"assert": "assert half(4) == 2"}], "setup": "import math"}
    body = "def half(x: int):\n    return math.floor(x / 2)\n"
    assert coding.verify_coding(f"```python\n{head}{body}```", problem).score == 1.0
    space: dict[str, Any] = {}
    exec(compile(run[0], "program", "exec"), space)
    assert space["half"](5) == 2 and run[0].count("import math") == 1


def test_tests_with_numbers_that_no_record_holds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"task": "t", "function": "f", "tests": [{"args": [1], "expected": 1}]}
    rows = [{**row, "tests": [{"args": [2**70], "expected": 1}]}, row]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **words: rows)
    assert [each["id"] for each in coding.load_problems(["own/rows:train"])] == ["own/rows:train-1"]
