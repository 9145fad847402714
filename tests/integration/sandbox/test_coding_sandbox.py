"""The local sandbox: what a program can do, and that nothing runs where it cannot be isolated; and SandboxFusion."""

from __future__ import annotations

import http.server
import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakes.ports import refused_port

from pipelinerl.domains import coding, multi
from pipelinerl.domains import coding as verify_module
from pipelinerl.domains.coding import find_program, sandbox_endpoint
from pipelinerl.domains.user_task import gold_score
from pipelinerl.errors import ConfigError, RetryableRolloutError
from pipelinerl.sandbox import fusion as fusion_module
from pipelinerl.sandbox import programs as sandbox
from pipelinerl.sandbox.programs import Limits, SandboxUnavailableError, run_program
from pipelinerl.sandbox.protocol import Grade

# Programs that end by themselves; on a machine with other work that takes a while.
LIMITS = Limits(cpu_s=20, wall_s=60.0)


@pytest.fixture(scope="module")
def runs() -> None:
    try:
        sandbox.check_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error)[:200])


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("source", "stdout"),
    [
        ("import json; print(json.loads(input())[0] * 2)", "42\n"),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 42)))", "42\n"),
        ("from concurrent.futures import ThreadPoolExecutor as T; print(sum(T(8).map(abs, range(-3, 3))))", "9\n"),
        ("import sys; sys.stdin.readline(); sys.stdin.seek(0); print(sys.stdin.read())", "[21]\n"),
        (
            "import os; open('a', 'w').write('42'); print(open('/tmp/a').read(), os.listdir())",
            "42 ['a', 'program.py']\n",
        ),
        ("import sys; sys.setrecursionlimit(10**5); f = lambda n: n and 1 + f(n - 1); print(f(5000))", "5000\n"),
    ],
)
def test_a_program_computes(source: str, stdout: str) -> None:
    done = run_program(source, "[21]", LIMITS)
    assert (done.ending, done.stdout) == ("finished", stdout), done


def test_where_nothing_can_be_isolated_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """X8: it is refused, not weakened."""
    sandbox.check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "_JAIL", Path("/no-such-file"))
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    config = type("Config", (), {"sandbox_endpoint": None})()
    with pytest.raises(SandboxUnavailableError):
        run_program("print(1)")
    with pytest.raises(ConfigError, match="SandboxFusion"):
        coding.check_config(config)
    sandbox.check_sandbox.cache_clear()


def test_programs_are_found() -> None:
    assert find_program("x ```python\na = 1\n``` y ```py\nb = 2\n``` z") == "b = 2\n"
    assert find_program("```\nc\n```") == "c\n"
    assert find_program("```python\na\n``` and ```python\ncut") == "a\n"
    assert find_program("```python\ncut off") is None
    assert find_program("no code") is None
    assert find_program("```bash\nls\n```") is None


PLUS = "```python\ndef solve(x):\n    return x + 1\n```"


@pytest.mark.parametrize(
    "text",
    [
        f"{PLUS}\nOutput:\n```\n5\n```",
        f"{PLUS}\nRun it:\n```bash\npython a.py\n```",
        "1. Here:\n   " + PLUS.replace("\n", "\n   "),
        "- " + PLUS.replace("\n", "\n  "),
        f"{PLUS} as in ```python\nprint(solve(4))\n```",
        f"<think>{PLUS}</think>{PLUS}\n<think>or ```python\ndef solve(x):\n    pass\n```",
    ],
)
def test_the_program_is_found_among_other_blocks(text: str) -> None:
    assert find_program(text, "solve") == "def solve(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        (0.1 + 0.2, 0.3, True),
        (2.0, 2, True),
        ([{"a": [0.1 + 0.2]}], [{"a": [0.3]}], True),
        (0.0, 1e-13, False),
        (1e-13, 0.0, True),
        (1.6e-19, 9.1e-31, False),
        ([True], [1], False),
        (1, True, False),
        (2**80 + 1, 2**80, False),
        (" a", "a", False),
        ([1, 2], [1], False),
    ],
)
def test_results_are_compared_at_every_level(found: object, expected: object, is_same: bool) -> None:
    assert coding.same_value(found, expected) is is_same


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ("0.30000000000000004\n", "0.3", True),
        ("a 1 2.50  \nb\n\n", "a 1 2.5\nb", True),
        ("1", "01", False),
        ("3.14159", "3.14", False),
        ("1 2", "1", False),
        ("a\vb", "a\nb", False),
        ("nan", "1.0", False),
    ],
)
def test_outputs_are_compared(found: str, expected: str, is_same: bool) -> None:
    assert coding.same_output(found, expected) is is_same


class Cut(NamedTuple):
    status: int


class Fusion(http.server.BaseHTTPRequestHandler):
    """Answers like SandboxFusion; the program's text decides how the run ends, `server.faults` what comes before that.

    A fault is a status of HTTP, a text in place of an answer, or an answer of its own.
    """

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and body["language"] == "python"
        faults: deque[Any] = self.server.faults  # type: ignore[attr-defined]
        if faults:
            return self.fail(faults.popleft() if len(faults) > 1 or faults[0] != ALWAYS else 503)
        code = body["code"]
        stdout = body["stdin"].upper() if "upper" in code else "42\n" if "6 * 7" in code else ""
        stdout = "\n" * (3 << 20) if "newlines" in code else "x" * (2 << 20) if "letters" in code else stdout
        result: dict[str, Any] = {"status": "Finished", "return_code": 0, "stdout": stdout, "stderr": ""}
        if "slow" in code:
            result = {"status": "TimeLimitExceeded"}
        self.answer({"status": "Success", "run_result": None if "broken" in code else result})

    def fail(self, fault: Any) -> None:
        if fault == "close":
            self.close_connection = True
        elif isinstance(fault, Cut):  # the connection is lost in the middle of what was announced
            self.send_response(fault.status)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"status": "Succ')
            self.close_connection = True
        elif isinstance(fault, int):
            self.send_error(fault)
        elif isinstance(fault, str):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(fault.encode())
        else:
            self.answer(fault)

    def answer(self, content: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


ALWAYS = "503 for ever"
SANDBOX_ERROR = {"status": "SandboxError", "message": "no free place", "run_result": None}
PROBLEM = {"tests": [{"input": "ab", "output": "AB"}]}
UPPER = "```python\nupper\n```"


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Fusion)
        self.faults: deque[Any] = deque()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def fusion(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(fusion_module, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(fusion_module, "_LONGEST_DELAY_S", 0.02)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(60)


def config(endpoint: str | None) -> Any:
    return type("Config", (), {"sandbox_endpoint": endpoint})()


def test_sandbox_fusion(fusion: Server) -> None:
    assert coding.verify_coding(UPPER, PROBLEM, endpoint=fusion.url).score == 1.0
    slow = coding.verify_coding("```python\nslow\n```", PROBLEM, endpoint=fusion.url)
    assert slow.score == 0.0 and slow.details["time_limit"] == 1.0
    with pytest.raises(SandboxUnavailableError, match="was not run"):
        coding.verify_coding("```python\nbroken\n```", PROBLEM, endpoint=fusion.url)


@pytest.mark.parametrize("program", ["newlines", "letters"])
def test_a_program_that_prints_too_much_on_the_server_fails_its_test(fusion: Server, program: str) -> None:
    """The first is longer than any allowed answer, the second is read whole."""
    grade = coding.verify_coding(f"```python\n{program}\n```", PROBLEM, endpoint=fusion.url)
    assert (grade.score, grade.status, grade.details["output_limit"]) == (0.0, "wrong", 1.0)


@pytest.mark.parametrize("fault", [429, 500, 503, "close", SANDBOX_ERROR, Cut(200), Cut(503)])
def test_passing_faults_of_the_server_are_tried_again(fusion: Server, fault: Any) -> None:
    fusion.faults.extend([fault, fault])
    assert coding.verify_coding(UPPER, PROBLEM, endpoint=fusion.url).score == 1.0


@pytest.mark.parametrize(
    ("fault", "words"), [(404, "status 404"), ("<html>", "not an answer of SandboxFusion"), ("[]", "not an answer")]
)
def test_other_faults_of_the_server_are_not_tried_again(fusion: Server, fault: Any, words: str) -> None:
    fusion.faults.append(fault)
    with pytest.raises(SandboxUnavailableError, match=f"{words}.*Check the address"):
        coding.verify_coding(UPPER, PROBLEM, endpoint=fusion.url)
    assert not fusion.faults


def test_a_server_that_stays_away_is_a_failure_that_may_pass(fusion: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_module.Patience.__init__, "__defaults__", (0.05,))
    fusion.faults.append(ALWAYS)
    with refused_port() as port:
        for endpoint in (fusion.url, f"http://127.0.0.1:{port}"):
            with pytest.raises(RetryableRolloutError, match=r"run_code: .*attempts") as caught:
                coding.verify_coding(UPPER, PROBLEM, endpoint=endpoint)
            assert caught.value.reason == "sandbox_unreachable"


def test_the_server_is_tried_before_the_run(fusion: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    coding.check_config(config(fusion.url))
    monkeypatch.setenv("SANDBOX_ENDPOINT", fusion.url)
    coding.check_config(config(None))
    fusion.faults.append({"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4"}})
    with pytest.raises(ConfigError, match=r"SANDBOX_ENDPOINT: got .*print\(6 \* 7\), ended with"):
        coding.check_config(config(None))


@pytest.mark.parametrize(
    ("key", "variable", "used"),
    [("key", None, "key"), (None, "variable", "variable"), ("key", "variable", "key"), (None, None, None)],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_gold_answers_are_graded_where_rollouts_are(
    monkeypatch: pytest.MonkeyPatch, key: str | None, variable: str | None, used: str | None, mixed: bool
) -> None:
    """Both names of the server, the first before the second, as in `generate_coding_rollout`; also as part of a mix."""
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    if variable is not None:
        monkeypatch.setenv("SANDBOX_ENDPOINT", variable)
    seen: list[str | None] = []

    def grade(text: str, problem: dict[str, Any], endpoint: str | None = None) -> Grade:
        seen.append(endpoint)
        return Grade(1.0, "correct")

    monkeypatch.setattr(verify_module, "verify_coding", grade)
    [problem, *_] = coding.load_problems(["train"], num_train=4, num_test=4)
    if mixed:
        wrapped = {"module": "pipelinerl.domains.coding", "domain": "coding", "problem": problem}
        assert gold_score(multi.validate, wrapped, config(key)) == 1.0
    else:
        assert gold_score(coding.validate, problem, config(key)) == 1.0
    assert seen == [used] == [sandbox_endpoint(config(key))]
    # A task of the user's that calls it by itself, without a configuration.
    assert coding.validate(problem) == 1.0 and seen[1] == variable


@pytest.mark.parametrize("endpoint", ["localhost:8080", "ftp://h", "http://", "http://user:pw@h", "http://h:99999"])
def test_what_is_no_address_of_a_server_is_refused_before_the_run(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox_endpoint: got .*http://HOST:PORT") as caught:
        coding.check_config(config(endpoint))
    assert "user:pw" not in str(caught.value)


def test_a_server_that_is_not_there_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.domains.coding._PATIENCE_S", 0.05)
    with refused_port() as port, pytest.raises(ConfigError, match="sandbox_unreachable"):
        coding.check_config(config(f"http://127.0.0.1:{port}"))


def test_the_time_for_grading_covers_every_program_and_all_patience() -> None:
    # Three programs that take 6 s and answer late by 10 s, one more attempt behind 30 s of patience, one pause of 4 s.
    assert fusion_module.grading_timeout_s(3, Limits(wall_s=6.0)) == 4 * 16.0 + 30.0 + 4.0
