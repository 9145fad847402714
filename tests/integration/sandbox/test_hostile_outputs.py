"""R2, T7: a corpus of hostile outputs goes through every grader within its deadline, and none of them scores."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fakes.loop_lag import measured_lag

from pipelinerl.domains import coding, countdown, counting, fn_calling, ifeval, logic, math
from pipelinerl.sandbox.pool import LOAD_TIMEOUT_S, GraderPool
from pipelinerl.sandbox.protocol import Failed, Grade, GradeRequest, grader_path

TIMEOUT_S = 2.0
# Where the time that a grading takes is not looked at.
LIMIT_S = 60.0
MEGABYTE = 1 << 20
TAG, BOX = "<answer>{}</answer>", "\\boxed{{{}}}"

CONTENTS = {
    "tower": "9**9**9**9**9",
    "latex tower": "9^{9^{9^{9^{9}}}}",
    "factorials": "((((99999!)!)!)!)!",
    "long sum": "+".join(["1"] * 50_000),
    "long number": "9" * 20_000,
    "brackets": "(" * 5000 + "1" + ")" * 5000,
    "nested fractions": "\\frac{1}{" * 300 + "1" + "}" * 300,
    "nested roots": "\\sqrt{" * 300 + "2" + "}" * 300,
    "big integral": "\\int_0^1 \\int_0^1 \\sin(x^{x^{x}}) \\cos(e^{x^y}) dx dy",
    "big product": "\\prod_{i=1}^{10^{9}} i",
    "binomial": "\\binom{10^{10}}{5 \\cdot 10^{9}}",
    "code": "__import__('os').system('touch owned')",
    "code in a list": "[__import__('os').system('touch owned')]",
    "lambda": "(lambda f: f(f))(lambda f: f(f))",
    "NUL": "1\x00 2\x00",
    "digits of other scripts": "\u0663\u0664\u0665 \U0001d7d9 \u00bd \u2460",
    "directions": "\u202e54321\u202c\u200b\u200d",
    "combining marks": "a" + "\u0301" * 10_000,
    "surrogate": "\ud800\udfff",
    "percent": "%s%n{0.__class__}" * 100,
}
OUTPUTS = {
    "empty": "",
    "a megabyte": "a" * MEGABYTE,
    "a megabyte of space": " " * MEGABYTE,
    "a megabyte of brackets": "[" * MEGABYTE,
    "a megabyte of open tags": "<answer>" * (MEGABYTE // 8),
    "a megabyte of closed tags": "</answer>" * (MEGABYTE // 9),
    "a megabyte of open boxes": "\\boxed{" * (MEGABYTE // 7),
    "a megabyte of calls": "<tool_call>" * (MEGABYTE // 11),
    "a megabyte of backticks": "`" * MEGABYTE,
    "a megabyte of thinking": "<think>" * (MEGABYTE // 7) + "</think>",
    "a megabyte of commas": "1," * (MEGABYTE // 2),
    "half-open tag": "<answer>4",
    "tag cut off": "<answer>4</answ",
    "box cut off": "\\boxed{\\frac{1}{2",
    "call cut off": '<tool_call>{"name": "get_weather", "arguments": {"city": "Os',
    "call with other JSON": '<tool_call>{"name": 7, "arguments": [1]}</tool_call><tool_call>[]</tool_call>',
    "call with deep JSON": '<tool_call>{"name": "x", "arguments": {"a": ' + "[" * 100_000 + "</tool_call>",
    "call with big number": '{"name": "set_timer", "arguments": {"minutes": 1e999999}}',
    "code cut off": "```python\nwhile True:",
    **{f"tagged {name}": TAG.format(text) for name, text in CONTENTS.items()},
    **{f"boxed {name}": BOX.format(text) for name, text in CONTENTS.items()},
    **{f"fenced {name}": f"```python\n{text}\n```" for name, text in CONTENTS.items() if len(text) < 1000},
}


def math_problem() -> dict[str, Any]:
    return {**math.load_problems(["test"])[0], "answer": "\\frac{17}{3}"}


def coding_problem() -> dict[str, Any]:
    problem = coding.load_problems(["test"])[0]
    return {**problem, "tests": problem["tests"][:1]}


# Graders that are in time for every output.
NEVER_LATE = ("counting", "countdown", "ifeval", "fn_calling")
FAMILIES = ("spiral_matrix", "countdown", "polynomial_multiplication", "n_queens")
# Grader, and its problems.
CASES: dict[str, tuple[Any, Any]] = {
    "counting": (counting.verify_counting, lambda: counting.load_problems(["test"])[:1]),
    "countdown": (countdown.verify_countdown, lambda: countdown.load_problems(["test"])[:1]),
    "math": (math.verify_math, lambda: [math_problem()]),
    "ifeval": (
        ifeval.verify_ifeval,
        lambda: [{"constraints": [{"kind": "keyword", "word": "zebra"}, {"kind": "json", "keys": ["q"]}]}],
    ),
    "fn_calling": (fn_calling.verify_fn_calling, lambda: fn_calling.load_problems(["test"])[:1]),
    "logic": (logic.verify_logic, lambda: logic.load_problems(["test"], families=FAMILIES, num_test=1)),
}


# Of each kind one or two: the parser of formulas and the scorers of puzzles need seconds for some of the others.
FEW = (
    *("empty", "a megabyte", "a megabyte of open boxes", "box cut off", "boxed tower", "boxed long sum"),
    *("boxed brackets", "boxed code", "boxed NUL", "boxed surrogate", "tagged latex tower", "call cut off"),
)
SELECTIONS = [
    *(pytest.param(name, tuple(OUTPUTS), id=name) for name in NEVER_LATE),
    *(pytest.param(name, FEW, id=f"{name}-part") for name in ("math", "logic")),
    *(pytest.param(name, tuple(OUTPUTS), id=name, marks=pytest.mark.slow) for name in ("math", "logic")),
]


@pytest.mark.parametrize(("name", "labels"), SELECTIONS)
async def test_r2_every_hostile_output_is_graded_in_time_and_scores_nothing(
    name: str, labels: tuple[str, ...], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    function, make_problems = CASES[name]
    cases = [(label, OUTPUTS[label], problem) for problem in make_problems() for label in labels]
    async with GraderPool(size=2, timeout_s=TIMEOUT_S, memory_bytes=2 << 30) as pool:
        await pool.grade(GradeRequest(grader_path(function), "", cases[0][2]))

        places = asyncio.Semaphore(2)

        async def grade(label: str, text: str, problem: dict[str, Any]) -> tuple[str, Grade | Failed, float]:
            async with places:
                # The best of three: a machine that stands still for a moment must not decide.
                for _ in range(3):
                    started = time.monotonic()
                    answer = await pool.grade(GradeRequest(grader_path(function), text, problem))
                    seconds = time.monotonic() - started
                    if name not in NEVER_LATE or isinstance(answer, Grade) or answer.reason != "grader_timeout":
                        break
                return label, answer, seconds

        for label, answer, seconds in await asyncio.gather(*(grade(*case) for case in cases)):
            # A new process may have had to load the grader's libraries.
            assert seconds < TIMEOUT_S + LOAD_TIMEOUT_S, f"{label}: {seconds:.1f} s"
            if isinstance(answer, Grade):
                assert answer.status != "correct" and answer.score < 0.5, f"{label}: {answer}"
            else:
                assert answer.reason in ("grader_timeout", "grader_memory", "grader_died", "grader_raised"), answer
                assert name not in NEVER_LATE, f"{label}: {answer}"
    assert not (tmp_path / "owned").exists()


async def test_r2_the_event_loop_is_free_while_a_megabyte_is_graded() -> None:
    # The best of three: a machine that stands still for a moment must not decide.
    lags_s: list[float] = []
    while not lags_s or (lags_s[-1] >= 0.1 and len(lags_s) < 3):
        lags_s.append(await _lag_p99_s())
    assert lags_s[-1] < 0.1, f"the event loop stood still: p99 of three attempts {lags_s}"


async def _lag_p99_s() -> float:
    problem = counting.load_problems(["test"])[0]
    async with GraderPool(size=1, timeout_s=LIMIT_S, memory_bytes=1 << 30) as pool, measured_lag() as lag:
        path = grader_path(counting.verify_counting)
        await asyncio.gather(*(pool.grade(GradeRequest(path, "<answer>" * 125_000, problem)) for _ in range(20)))
    return lag.p99_s


def test_r2_hostile_programs_are_verdicts() -> None:
    problem = coding_problem()
    for program in (
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "def solve(x): return __builtins__",
        "\x00",
        "def solve(",
        "x",
    ):
        grade = coding.verify_coding(f"```python\n{program}\n```", problem)
        assert grade.score == 0.0 and grade.status in ("wrong", "unparsable")
