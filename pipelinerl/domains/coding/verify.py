"""Grades a program by its tests, in the local sandbox or on a SandboxFusion server. Called in grader processes.

Expected results stay outside of the sandbox: a program cannot read them, and ending early proves nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipelinerl.domains.answers import after_thinking
from pipelinerl.domains.coding.check import sandbox_endpoint
from pipelinerl.domains.coding.fusion import Patience, run_remotely
from pipelinerl.domains.coding.limits import Limits, Run
from pipelinerl.domains.coding.problems import gold_answer
from pipelinerl.domains.coding.sandbox import run_program
from pipelinerl.sandbox.marking import grader
from pipelinerl.sandbox.messages import Grade

MAX_PROGRAM_CHARACTERS = 100_000
# Calls the function that the problem asks for with the arguments on stdin, and prints what it returns as JSON.
_DRIVER = """

if __name__ == "__main__":
    import json as _json, sys as _sys
    print("\\n" + _json.dumps({function}(*_json.loads(_sys.stdin.read()))))
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
    program = find_program(text)
    if program is None:
        return Grade(0.0, "no_answer")
    if len(program) > MAX_PROGRAM_CHARACTERS or "\0" in program:
        return Grade(0.0, "unparsable")
    tests = problem["tests"]
    function = problem.get("function")
    if function is not None:
        program += _DRIVER.format(function=function)
    patience = Patience()
    passed, endings = 0, {"crashed": 0.0, "time_limit": 0.0, "output_limit": 0.0}
    for test in tests:
        stdin = msgspec.json.encode(test["args"]).decode() if function is not None else str(test["input"])
        run = _run(program, stdin, endpoint, patience)
        is_passed = _is_passed(run, test, function is not None)
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


def find_program(text: str) -> str | None:
    """Return the last complete block of code between three backticks, or None."""
    pieces = after_thinking(text).split("```")
    if len(pieces) < 3:
        return None
    block = pieces[len(pieces) - 2 - (len(pieces) % 2 == 0)]
    first_line, newline, rest = block.partition("\n")
    return rest if newline and first_line.strip().lower() in ("python", "python3", "py", "") else block


def _run(program: str, stdin: str, endpoint: str | None, patience: Patience) -> Run:
    limits = Limits()
    if endpoint:
        return run_remotely(endpoint, program, stdin, limits, patience)
    return run_program(program, stdin, limits)


def _is_passed(run: Run, test: dict[str, Any], is_function: bool) -> bool:
    if run.ending != "finished":
        return False
    if not is_function:
        return _lines(run.stdout) == _lines(str(test["output"]))
    try:
        value = msgspec.json.decode(run.stdout.rstrip("\n").rpartition("\n")[2])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return False
    return type(value) is type(test["expected"]) and bool(value == test["expected"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def validate(problem: dict[str, Any], config: Any = None) -> float | None:
    """Return the score of the reference solution, run where a rollout would run it; None where there is none."""
    gold = gold_answer(problem)
    return None if gold is None else verify_coding(gold, problem, sandbox_endpoint(config)).score
