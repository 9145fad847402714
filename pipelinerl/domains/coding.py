"""Programming: the model writes a Python program, which a sandbox runs on tests.

Problems are small functions made here, or rows of a data set with `task` and `tests` (the forms are in `code_tests`);
tests of a function need its name in `function`, and `solution` is optional.
"""

from __future__ import annotations

import inspect
import os
import random
import re
import secrets
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.domains.answers import same_float, same_value
from pipelinerl.domains.code_tests import coding_problem
from pipelinerl.domains.data_sets import load_data_sets
from pipelinerl.domains.single_turn import answer_once
from pipelinerl.errors import ConfigError, RetryableRolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.tokens import after_thinking
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.fusion import Patience, grading_timeout_s, is_endpoint, run_remotely
from pipelinerl.sandbox.programs import Limits, ProgramRun, SandboxUnavailableError, check_sandbox, run_program
from pipelinerl.sandbox.protocol import Grade, grader


@dataclass(frozen=True)
class Task:
    """`words` complete "a function solve(x) that returns ..."; `{k}` in them is the variant's number."""

    words: str
    solve: Callable[[Any, int], Any]
    draw_argument: Callable[[random.Random], Any]


def sum_of_multiples(x: list[int], k: int) -> int:
    return sum(value for value in x if value % k == 0)


def count_above(x: list[int], k: int) -> int:
    return sum(value > k for value in x)


def every_kth(x: list[int], k: int) -> list[int]:
    return x[::k]


def rotated(x: list[int], k: int) -> list[int]:
    return x[k % len(x) :] + x[: k % len(x)] if x else []


def in_base(x: int, k: int) -> list[int]:
    digits = []
    while x:
        digits.append(x % k)
        x //= k
    return digits[::-1] or [0]


def long_words(x: str, k: int) -> list[str]:
    return [word for word in x.split() if len(word) >= k]


def shifted(x: str, k: int) -> str:
    return "".join(chr((ord(letter) - 97 + k) % 26 + 97) if letter.isalpha() else letter for letter in x)


def largest_window(x: list[int], k: int) -> int:
    return max(sum(x[start : start + k]) for start in range(max(len(x) - k, 0) + 1))


def chunks(x: list[int], k: int) -> list[list[int]]:
    return [x[start : start + k] for start in range(0, len(x), k)]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(1, 15))]


def _number(rng: random.Random) -> int:
    return rng.randint(1, 5000)


def _sentence(rng: random.Random) -> str:
    words = ("".join(rng.choices("abcdefghij", k=rng.randint(1, 14))) for _ in range(rng.randint(1, 8)))
    return " ".join(words)


TASKS = (
    Task("the sum of the numbers in the list x that are divisible by {k}.", sum_of_multiples, _numbers),
    Task("how many numbers in the list x are greater than {k}.", count_above, _numbers),
    Task("a list of every {k}th element of the list x, starting with the first.", every_kth, _numbers),
    Task("the list x rotated to the left by {k} places.", rotated, _numbers),
    Task("the digits of the whole number x in base {k}, as a list with the highest digit first.", in_base, _number),
    Task("the list of words in the text x that have at least {k} letters.", long_words, _sentence),
    Task(
        "the text x with each lower-case letter moved {k} places on in the alphabet, around its end.",
        shifted,
        _sentence,
    ),
    Task(
        "the largest sum of {k} neighbouring numbers in the list x (of all of them, if there are fewer).",
        largest_window,
        _numbers,
    ),
    Task("the list x cut into lists of {k} elements; the last one may be shorter.", chunks, _numbers),
)


_NUM_TESTS = 4


def load_problems(
    dataset_names: Sequence[str],
    *,
    num_train: int = 64,
    num_test: int = 16,
    seed: int = 0,
    fields: Mapping[str, str] | None = None,
    limit: int | None = None,
    max_tests: int | None = 20,
) -> list[dict[str, Any]]:
    """Return the problems of the names `train` and `test` (made here) and of other data sets.

    Args:
        num_train, num_test, seed: of the problems made here.
        fields, limit: see `load_data_sets`.
        max_tests: at most so many tests of each of their problems, evenly spread; None: all.

    Raises:
        DomainError: see `load_data_sets`.
    """

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
        task = rng.choice(TASKS)
        number = rng.randint(2, 12)
        tests = []
        for _ in range(_NUM_TESTS):
            argument = task.draw_argument(rng)
            tests.append({"args": [argument], "expected": task.solve(argument, number)})
        problem = {
            "task": f"Write a Python function solve(x) that returns {task.words.format(k=number)}",
            "function": "solve",
            "tests": tests,
            "solution": (
                f"{inspect.getsource(task.solve)}\n\ndef solve(x):\n    return {task.solve.__name__}(x, {number})"
            ),
        }
        return f"{task.solve.__name__}/{number}", problem

    def convert(values: dict[str, Any]) -> dict[str, Any] | str:
        return coding_problem(values, max_tests)

    return load_data_sets("coding", dataset_names, draw, (num_train, num_test), seed, convert, fields, limit)


def gold_answer(problem: dict[str, Any]) -> str | None:
    """Return a right output, if the problem has a solution."""
    solution = problem.get("solution")
    return None if solution is None else f"```python\n{solution}\n```"


ENDPOINT_KEY = "SANDBOX_ENDPOINT"
_PATIENCE_S = 5.0


def sandbox_endpoint(config: Any) -> str | None:
    """Return the SandboxFusion server to use: `sandbox_endpoint`, else the environment's; None: the local sandbox."""
    named = None if config is None else config.sandbox_endpoint
    return named or os.environ.get(ENDPOINT_KEY) or None


def check_config(config: Any) -> None:
    """Check that programs can be run.

    Raises:
        ConfigError: there is neither a server that runs them nor a way to isolate programs here.
    """
    endpoint = sandbox_endpoint(config)
    if endpoint is not None:
        _check_server(endpoint, "sandbox_endpoint" if config.sandbox_endpoint else ENDPOINT_KEY)
        return
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        raise ConfigError(
            "sandbox_endpoint", None, "a server, or a machine that can isolate programs", str(error)
        ) from error


def _check_server(endpoint: str, key: str) -> None:
    expected = "the address of a SandboxFusion server that runs programs"
    if not is_endpoint(endpoint):
        # With a user name there may be a password, which is not for the terminal and the log.
        shown = "(hidden: it has a user name or a password)" if "@" in endpoint else endpoint
        raise ConfigError(key, shown, expected, "Write it as http://HOST:PORT.")
    try:
        run = run_remotely(endpoint, "print(6 * 7)", patience=Patience(_PATIENCE_S))
    except (SandboxUnavailableError, RetryableRolloutError) as error:
        raise ConfigError(key, endpoint, expected, str(error)) from error
    if run.ending != "finished" or run.stdout.strip() != "42":
        raise ConfigError(key, endpoint, expected, f"A first program, print(6 * 7), ended with {run}.")


MAX_PROGRAM_CHARACTERS = 100_000
# Calls the function that the problem asks for, or that method of the class `Solution`, with the arguments on stdin, and
# prints what it returns as JSON.
_DRIVER = """

if __name__ == "__main__":
    import json as _json, sys as _sys
    _call = globals().get("{function}") or getattr(Solution(), "{function}")
    print("\\n" + _json.dumps(_call(*_json.loads(_sys.stdin.read()))))
"""


@grader(confined=False)
def verify_coding(text: str, problem: dict[str, Any], endpoint: str | None = None, partial: bool = False) -> Grade:
    """1 if the program passes all tests; with `partial`, else the share of passed tests.

    A program that is too slow, too large or crashes fails its test: these are verdicts on the program, not failures
    of the grader.

    Raises:
        SandboxUnavailableError: programs cannot be run.
        RetryableRolloutError: the server at `endpoint` was busy or away for too long.
    """
    tests = problem["tests"]
    function = problem.get("function")
    program = find_program(text, function)
    if program is None:
        return Grade(0.0, "no_answer")
    if len(program) > MAX_PROGRAM_CHARACTERS or "\0" in program:
        return Grade(0.0, "unparsable")
    if problem.get("setup"):
        future = _FUTURE.search(program)  # which has to come first
        place = future.end() if future is not None else 0
        program = f"{program[:place]}{problem['setup']}\n{program[place:]}"
    patience = Patience()
    passed, endings = 0, {"crashed": 0.0, "time_limit": 0.0, "output_limit": 0.0}
    for test in tests:
        run, is_passed = _tested(program, test, function, endpoint, patience)
        passed += is_passed
        if run.ending in endings:
            endings[run.ending] = 1.0
        if not is_passed and not partial:
            break
    share = passed / len(tests)
    details = {"tests_passed": share, **endings}
    if passed == len(tests):
        return Grade(1.0, "correct", details)
    return Grade(share if partial else 0.0, "wrong", details)


#: Lines `from __future__ import ...`, also of several, up to the last one that Python takes.
_FUTURE = re.compile(
    r"(?:^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]*\)[^\n]*|(?:[^\n\\]|\\\n)*)\n(?:[ \t]*(?:#[^\n]*)?\n)*)+",
    re.MULTILINE,
)
_FENCE = re.compile(r"(?P<line_start>^[ \t]*(?:[-*+>][ \t]+|\d{1,3}[.)][ \t]+)?)?```(?P<rest>[^\n`]*)", re.MULTILINE)
_PYTHON = re.compile(r"py(thon)?[\d.]*", re.IGNORECASE)


def find_program(text: str, function: str | None = None) -> str | None:
    """Return the program in a model's text, or None.

    It is the last complete block between three backticks that is marked as Python, or else the last one without a
    language: output and commands may follow. If a `function` is asked for, the last block that defines it comes first.
    """
    blocks = _blocks(after_thinking(text))
    programs = [block for language, block in blocks if _PYTHON.fullmatch(language)]
    programs = programs or [block for language, block in blocks if not language]
    if function is not None:
        defines = re.compile(rf"^ *(?:async +def|def|class) +{re.escape(function)}\b|^{re.escape(function)} *=", re.M)
        programs = [block for block in programs if defines.search(block)] or programs
    return programs[-1] if programs else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the content, without its indentation, of all complete blocks.

    A block of several lines ends with backticks at the beginning or the end of a line: a program may hold others.
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
            continue
        has_lines = text.startswith("\n", opened.end())
        ends_line = not fence["rest"].strip() and (fence.end() == len(text) or text[fence.end()] == "\n")
        if has_lines and fence["line_start"] is None and not ends_line:
            continue
        words = opened["rest"].split() if has_lines else []
        begin = opened.end() + 1 if has_lines else opened.start("rest")
        blocks.append((words[0] if words else "", textwrap.dedent(text[begin : fence.start()])))
        opened = None
    return blocks


def run_in_sandbox(
    program: str, stdin: str = "", endpoint: str | None = None, patience: Patience | None = None
) -> ProgramRun:
    """Run a program on the server at `endpoint`, or else in the local sandbox.

    Raises:
        SandboxUnavailableError, RetryableRolloutError: as in `verify_coding`.
    """
    limits = Limits()
    if endpoint:
        return run_remotely(endpoint, program, stdin, limits, patience)
    return run_program(program, stdin, limits)


def _tested(
    program: str, test: dict[str, Any], function: str | None, endpoint: str | None, patience: Patience
) -> tuple[ProgramRun, bool]:
    """Return how the program ran on one test, and whether it passed."""
    if "assert" in test:
        # A program that ends itself before the test never prints this.
        passed = secrets.token_hex(8)
        run = run_in_sandbox(f"{program}\n\n{test['assert']}\nprint('\\n{passed}')\n", "", endpoint, patience)
        return run, run.ending == "finished" and _last_line(run) == passed
    if "input" in test:
        run = run_in_sandbox(program, str(test["input"]), endpoint, patience)
        return run, run.ending == "finished" and same_output(run.stdout, str(test["output"]))
    stdin = msgspec.json.encode(test["args"]).decode()
    run = run_in_sandbox(program + _DRIVER.format(function=function), stdin, endpoint, patience)
    if run.ending != "finished":
        return run, False
    try:
        value = msgspec.json.decode(_last_line(run))
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return run, False
    accepted = test["accepted"] if "accepted" in test else [test["expected"]]
    return run, any(same_value(value, each) for each in accepted)


def _last_line(run: ProgramRun) -> str:
    return run.stdout.rstrip("\n").rpartition("\n")[2]


_DECIMAL = re.compile(r"[+-]?(?:\d{1,400}\.\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,4})?|[+-]?\d{1,15}")


def same_output(found: str, expected: str) -> bool:
    """Return whether two outputs have the same lines; white space at the ends does not count.

    Beside a number with a decimal point, numbers count by their value, up to a rounding error.
    """
    lines, wanted = _lines(found), _lines(expected)
    return len(lines) == len(wanted) and all(a == b or _same_words(a, b) for a, b in zip(lines, wanted, strict=True))


def _same_words(found: str, expected: str) -> bool:
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(a == b or _same_decimal(a, b) for a, b in zip(words, wanted, strict=True))


def _same_decimal(found: str, expected: str) -> bool:
    if "." not in found + expected or not (_DECIMAL.fullmatch(found) and _DECIMAL.fullmatch(expected)):
        return False
    return same_float(float(found), float(expected))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def validate(problem: dict[str, Any], config: Any = None) -> float | None:
    """Return the score of the reference solution, run where a rollout would run it; None where there is none."""
    gold = gold_answer(problem)
    return None if gold is None else verify_coding(gold, problem, sandbox_endpoint(config)).score


SYSTEM_PROMPT = "Write a Python program. Put the whole program into one block between ```python and ```."
_MARGIN_S = 15.0


async def generate_coding_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Ask for a program and run it on the tests; `custom.partial_score` gives credit for some of them."""
    endpoint, limits, num_tests = sandbox_endpoint(cfg), Limits(), len(problem["tests"])
    timeout_s = grading_timeout_s(num_tests, limits) if endpoint else num_tests * (limits.wall_s + 1)
    return await answer_once(
        cfg,
        llm,
        problem,
        session,
        verify_coding,
        task=problem["task"],
        system_prompt=SYSTEM_PROMPT,
        timeout_s=timeout_s + _MARGIN_S,
        endpoint=endpoint,
        partial=bool(cfg.custom.get("partial_score", False)),
    )
