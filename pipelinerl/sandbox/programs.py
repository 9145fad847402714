"""Runs a Python program as a single process with no network, no files of this machine, and limits on all it does.

Needs Linux namespaces: where they cannot be had, `SandboxUnavailableError` says so and nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

Ending = Literal["finished", "crashed", "time_limit", "output_limit"]


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program: `cpu_s` of processor time, `wall_s` in all, memory, output, files and threads.

    `wall_s` ends programs that sleep. It is long, so that a busy machine does not fail programs that work.
    """

    cpu_s: int = 4
    wall_s: float = 16.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20
    threads: int = 64


@dataclass(frozen=True)
class ProgramRun:
    """How a run ended, and what it printed (up to the limit)."""

    ending: Ending
    stdout: str
    stderr: str = ""


class SandboxUnavailableError(Exception):
    """Programs cannot be isolated here; the message says what is missing."""


_JAIL = Path(__file__).with_name("jail.py")
_CHUNK = 1 << 16
_EXIT_XCPU = 128 + signal.SIGXCPU
_SHOWN_CHARACTERS = 400
_HELP = (
    "Programs of a model are run only where they can be isolated: on Linux (x86_64 or aarch64), as root that may make "
    "namespaces and change the user, or as another user with user namespaces. Set sandbox_endpoint (or "
    "SANDBOX_ENDPOINT) to a SandboxFusion server instead."
)


def run_program(source: str, stdin: str = "", limits: Limits = Limits()) -> ProgramRun:
    """Run `source` with `stdin` and return how it ended.

    Raises:
        SandboxUnavailableError: it cannot be isolated here.
    """
    check_sandbox()
    return _run(source, stdin, limits)


@functools.cache
def check_sandbox() -> None:
    """Run a first program, once in each process.

    Raises:
        SandboxUnavailableError: programs cannot be isolated here.
    """
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"this is not Linux. {_HELP}")
    try:
        run = _run("print(6 * 7)", "", Limits(wall_s=30, cpu_s=20))
    except SandboxUnavailableError as error:
        raise SandboxUnavailableError(f"{error}. {_HELP}") from error
    if run.ending != "finished" or run.stdout != "42\n":
        raise SandboxUnavailableError(f"a first program ended with {run}. {_HELP}")


def _run(source: str, stdin: str, limits: Limits) -> ProgramRun:
    ready_read, ready_write = os.pipe()
    with open(ready_read, "rb") as ready, _file_with(source) as program, _file_with(stdin) as given:
        python, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
        numbers = (os.getpid(), program.fileno(), ready_write)
        bounds = (limits.cpu_s, limits.memory_bytes, limits.file_bytes, limits.threads)
        try:
            child = subprocess.Popen(
                [python, "-I", "-S", "-B", str(_JAIL), python, prefix, *map(str, (*numbers, *bounds))],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(program.fileno(), ready_write),
                env={"LC_ALL": "C.UTF-8"},
            )
        finally:
            os.close(ready_write)
        with child:
            ending, out, err = _collect(child, limits)
        if ready.read() != b"ready\n":
            reason = (err.strip().splitlines() or ["it was killed"])[-1]
            raise SandboxUnavailableError(f"the sandbox could not be built: {reason[:_SHOWN_CHARACTERS]}")
    return ProgramRun(ending, out, err)


@contextlib.contextmanager
def _file_with(text: str) -> Iterator[IO[bytes]]:
    """An unnamed file that holds `text`, for reading only: a program could write to its descriptor."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.flush()
        with open(f"/proc/self/fd/{file.fileno()}", "rb") as reader:
            yield reader


def _collect(child: subprocess.Popen[bytes], limits: Limits) -> tuple[Ending, str, str]:
    """Read the program's output until it ends or meets a limit, then make sure that it is gone."""
    assert child.stdout is not None and child.stderr is not None
    parts: dict[IO[bytes], bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    deadline = time.monotonic() + limits.wall_s
    ending: Ending | None = None
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and ending is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                ending = "time_limit"
            for key, _ in selector.select(max(left_s, 0)):
                chunk = os.read(key.fd, _CHUNK)
                stream = next(each for each in parts if each.fileno() == key.fd)
                parts[stream] += chunk
                if not chunk:
                    selector.unregister(stream)
            if any(len(part) > limits.output_bytes for part in parts.values()):
                ending = "output_limit"
    if ending is None:
        try:
            code = child.wait(max(deadline - time.monotonic(), 0))
            ending = "finished" if code == 0 else "time_limit" if code == _EXIT_XCPU else "crashed"
        except subprocess.TimeoutExpired:
            ending = "time_limit"
    child.kill()  # its namespace goes with it, and all processes in it
    child.wait()
    out, err = (bytes(part[: limits.output_bytes]).decode("utf-8", "replace") for part in parts.values())
    return ending, out, err
