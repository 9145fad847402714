"""Runs a Python program with no network, no files of this machine, and limits on time, memory, output and processes.

Needs Linux namespaces: where they cannot be had, `SandboxUnavailableError` says so and nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import shutil
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
    """Limits of one run of a program: `cpu_s` of processor time, `wall_s` in all, memory, output and files."""

    cpu_s: int = 4
    wall_s: float = 6.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20
    processes: int = 64


@dataclass(frozen=True)
class Run:
    """How a run ended, and what it printed (up to the limit)."""

    ending: Ending
    stdout: str
    stderr: str = ""


class SandboxUnavailableError(Exception):
    """Programs cannot be isolated here; the message says what is missing."""


_JAIL = Path(__file__).with_name("jail.py")
_NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
_CHUNK = 1 << 16
_EXIT_XCPU = 128 + signal.SIGXCPU
_SHOWN_CHARACTERS = 400
_HELP = (
    "Programs of a model are run only where they can be isolated: on Linux, as root or with unprivileged user "
    "namespaces, with unshare (util-linux) and an unmasked /proc. Set sandbox_endpoint (or SANDBOX_ENDPOINT) to a "
    "SandboxFusion server instead."
)


def run_program(source: str, stdin: str = "", limits: Limits = Limits()) -> Run:
    """Run `source` with `stdin` and return how it ended.

    Raises:
        SandboxUnavailableError: it cannot be isolated here.
    """
    return _run(source, stdin, limits, as_root=works_as_root())


@functools.cache
def works_as_root() -> bool:
    """Return whether to isolate with the rights of root; else with a user namespace. Tried once in each process.

    Raises:
        SandboxUnavailableError: neither works.
    """
    if sys.platform != "linux" or shutil.which("unshare") is None:
        raise SandboxUnavailableError(f"this is not Linux, or unshare is missing. {_HELP}")
    reasons = []
    for as_root in (True, False) if os.geteuid() == 0 else (False,):
        try:
            run = _run("print(6 * 7)", "", Limits(wall_s=30, cpu_s=20), as_root=as_root)
        except SandboxUnavailableError as error:
            reasons.append(str(error))
            continue
        if run.ending == "finished" and run.stdout == "42\n":
            return as_root
        reasons.append(f"a first program ended with {run}")
    raise SandboxUnavailableError(f"{'; '.join(reasons)}. {_HELP}")


def _run(source: str, stdin: str, limits: Limits, *, as_root: bool) -> Run:
    ready_read, ready_write = os.pipe()
    with (
        open(ready_read, "rb") as ready,
        tempfile.TemporaryDirectory(prefix="pipelinerl-sandbox-") as root,
        _file_with(source) as program,
        _file_with(stdin) as given,
    ):
        os.chmod(root, 0o755)
        argv = [
            *("unshare", *_NAMESPACES, *(() if as_root else ("--user", "--map-root-user"))),
            *(os.path.realpath(sys.executable), "-I", "-S", "-B", str(_JAIL), root),
            *(os.path.realpath(sys.executable), sys.base_prefix, str(int(as_root))),
            *(str(program.fileno()), str(ready_write), str(limits.cpu_s), str(limits.memory_bytes)),
            *(str(limits.file_bytes), str(limits.processes)),
        ]
        try:
            child = subprocess.Popen(
                argv,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(program.fileno(), ready_write),
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C.UTF-8"},
            )
        finally:
            os.close(ready_write)
        with child:
            ending, out, err = _collect(child, limits)
        if ready.read() != b"ready\n":
            raise SandboxUnavailableError(f"the sandbox could not be built: {err[-_SHOWN_CHARACTERS:].strip()}")
    return Run(ending, out, err)


@contextlib.contextmanager
def _file_with(text: str) -> Iterator[IO[bytes]]:
    """An unnamed file that holds `text`, at its start."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        yield file


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
