"""The local sandbox: what a program can do, what it cannot, and that nothing runs where it cannot be isolated."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from pipelinerl.domains import coding
from pipelinerl.domains.coding import sandbox
from pipelinerl.domains.coding.limits import Limits, SandboxUnavailableError
from pipelinerl.domains.coding.verify import find_program
from pipelinerl.errors import ConfigError

QUICK = Limits(cpu_s=2, wall_s=5.0)


@pytest.fixture(scope="module", params=["root", "user namespace"])
def as_root(request: pytest.FixtureRequest) -> bool:
    wanted = request.param == "root"
    if wanted and os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    try:
        sandbox._run("", "", QUICK, as_root=wanted)
    except SandboxUnavailableError as error:
        pytest.skip(str(error)[:200])
    return wanted


def run(as_root: bool, source: str, stdin: str = "", limits: Limits = QUICK) -> Any:
    return sandbox._run(source, stdin, limits, as_root=as_root)


def test_a_program_reads_and_writes(as_root: bool) -> None:
    done = run(as_root, "import json; print(json.loads(input())[0] * 2)", "[21]")
    assert (done.ending, done.stdout) == ("finished", "42\n")


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "unreachable"),
        (f"open({__file__!r})", "FileNotFoundError"),
        ("open('/usr/owned', 'w')", "Read-only"),
        ("open('f', 'wb').write(b'x' * (1 << 26))", "Error"),
        ("bytearray(1 << 31)", "MemoryError"),
        ("import os; os.setuid(1)", "Error"),
        ("import os; os.chroot('/tmp')", "PermissionError"),
    ],
)
def test_walls(as_root: bool, source: str, word: str) -> None:
    done = run(as_root, source)
    assert done.ending == "crashed" and word in done.stderr, done


def test_it_sees_nothing_of_this_machine(as_root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    source = "import os, json; print(json.dumps([sorted(os.environ), os.listdir('/proc'), os.listdir('/dev')]))"
    environ, processes, devices = json.loads(run(as_root, source).stdout)
    assert "A_SECRET" not in environ and sorted(devices) == ["null", "urandom", "zero"]
    assert [name for name in processes if name.isdigit()] == ["1", "2"]


def test_it_cannot_get_rights_back(as_root: bool) -> None:
    source = (
        "import ctypes; c = ctypes.CDLL(None); print(c.unshare(0x10000000), c.unshare(0x20000), c.sethostname(b'x', 1))"
    )
    assert run(as_root, source).stdout == "-1 -1 -1\n"


def test_it_cannot_run_for_ever(as_root: bool) -> None:
    assert run(as_root, "while True: pass", limits=Limits(cpu_s=1, wall_s=4)).ending == "time_limit"
    assert run(as_root, "import time; time.sleep(60)", limits=Limits(wall_s=1)).ending == "time_limit"


def test_it_cannot_print_for_ever(as_root: bool) -> None:
    done = run(as_root, "while True: print('x' * 1000)")
    assert done.ending == "output_limit" and len(done.stdout) == QUICK.output_bytes


def test_what_it_starts_ends_with_it(as_root: bool) -> None:
    fork = "for _ in range(20):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(7321)"
    source = f"import os, time\n{fork}\nprint('x')"
    done = run(as_root, source, limits=Limits(wall_s=2))
    assert done.stdout == "x\n" or done.ending in ("time_limit", "crashed")
    program = [p for p in psutil.process_iter(["cmdline"]) if "program.py" in (p.info["cmdline"] or [])]
    psutil.wait_procs(program, timeout=3)
    assert not [p for p in program if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_where_nothing_can_be_isolated_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._works_as_root.cache_clear()
    monkeypatch.setattr(sandbox, "_NAMESPACES", ("--no-such-option",))
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    config = type("Config", (), {"sandbox_endpoint": None})()
    with pytest.raises(SandboxUnavailableError):
        sandbox.run_program("print(1)")
    with pytest.raises(ConfigError, match="SandboxFusion"):
        coding.check_config(config)
    monkeypatch.setenv("SANDBOX_ENDPOINT", "http://127.0.0.1:1")
    coding.check_config(config)
    sandbox._works_as_root.cache_clear()


def test_programs_are_found() -> None:
    assert find_program("x ```python\na = 1\n``` y ```py\nb = 2\n``` z") == "b = 2\n"
    assert find_program("```\nc\n```") == "c\n"
    assert find_program("```python\na\n``` and ```python\ncut") == "a\n"
    assert find_program("```python\ncut off") is None
    assert find_program("no code") is None


class Fusion(http.server.BaseHTTPRequestHandler):
    """Answers like SandboxFusion; the program's text decides how the run ends."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and body["language"] == "python"
        stdout = body["stdin"].upper() if "upper" in body["code"] else ""
        result = {"status": "Finished", "return_code": 0, "stdout": stdout, "stderr": ""}
        if "slow" in body["code"]:
            result = {"status": "TimeLimitExceeded"}
        payload = json.dumps({"status": "Success", "run_result": None if "broken" in body["code"] else result}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def fusion() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_sandbox_fusion(fusion: str) -> None:
    problem = {"tests": [{"input": "ab", "output": "AB"}]}
    assert coding.verify_coding("```python\nupper\n```", problem, endpoint=fusion).score == 1.0
    slow = coding.verify_coding("```python\nslow\n```", problem, endpoint=fusion)
    assert slow.score == 0.0 and slow.details["time_limit"] == 1.0
    with pytest.raises(SandboxUnavailableError, match="was not run"):
        coding.verify_coding("```python\nbroken\n```", problem, endpoint=fusion)
    with pytest.raises(SandboxUnavailableError, match="Check the address"):
        coding.verify_coding("```python\nupper\n```", problem, endpoint="http://127.0.0.1:1")
