"""Graders that misbehave in every way, for tests of the grader processes. Found there through PYTHONPATH."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from pipelinerl.errors import RetryableRolloutError
from pipelinerl.grading import Grade, grader


@grader
def exact(text: str, problem: dict[str, Any]) -> float:
    return float(text == problem["answer"])


@grader
def returns(text: str, problem: dict[str, Any]) -> Any:
    values = {
        "none": None,
        "nan": float("nan"),
        "empty": [],
        "text": "1.0",
        "int": 1,
        "zero": 0.0,
        "true": True,
        "infinite": Grade(float("inf"), "correct"),
    }
    return values[text]


@grader
def spins(text: str, problem: dict[str, Any]) -> float:
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001 - this is the fault
            continue


@grader
def swallows_everything(text: str, problem: dict[str, Any]) -> float:
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001 - this is the fault
            continue


@grader
def blocks_in_c(text: str, problem: dict[str, Any]) -> float:
    return float(re.fullmatch(r"(a+)+b", "a" * 40) is not None)


@grader
def sleeps(text: str, problem: dict[str, Any]) -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)
    return 1.0


@grader
def waits_a_moment(text: str, problem: dict[str, Any]) -> float:
    time.sleep(2)
    return 1.0


@grader
def allocates(text: str, problem: dict[str, Any]) -> float:
    return float(len([bytearray(1 << 26) for _ in range(1000)]))


@grader
def dies(text: str, problem: dict[str, Any]) -> float:
    os._exit(7)


@grader(confined=False)
def forks_and_hangs(text: str, problem: dict[str, Any]) -> float:
    child = subprocess.Popen(["sleep", "600"])
    Path(text).write_text(str(child.pid))
    child.wait()
    return 1.0


@grader
def raises(text: str, problem: dict[str, Any]) -> float:
    raise ValueError(f"no grade for {text!r}")


@grader
def uses_a_thread(text: str, problem: dict[str, Any]) -> float:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(float(threading.current_thread() is not None)))
    thread.start()
    thread.join()
    return scores[0]


@grader
def escapes(text: str, problem: dict[str, Any]) -> float:
    if text == "run":
        subprocess.run(["true"], check=True)
    elif text == "system":
        os.system("true")
    elif text == "connect":
        socket.create_connection(("127.0.0.1", 9))
    elif text == "write":
        Path(problem["path"]).write_text("x")
    elif text == "remove":
        os.remove(problem["path"])
    return 1.0


@grader
def shows_environment(text: str, problem: dict[str, Any]) -> float:
    return float(text in os.environ)


def not_marked(text: str, problem: dict[str, Any]) -> float:
    return 1.0


@grader
def needs_a_service(text: str, problem: dict[str, Any]) -> float:
    raise RetryableRolloutError("service_away", "it does not answer")
