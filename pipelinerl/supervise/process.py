"""One child process of the launcher: started in a session of its own, output in files, its end put on a queue.

A thread per child sleeps in `wait`, so nothing polls. The child inherits the read end of the launcher's death pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import msgspec


class ChildExited(msgspec.Struct, frozen=True):
    """A child ended. `returncode` is negative for the signal that killed it."""

    name: str
    returncode: int


class Interrupted(msgspec.Struct, frozen=True):
    """The launcher got a signal."""

    signum: int


Event = ChildExited | Interrupted


@dataclass
class Child:
    """A running child. `pid` is also the id of its process group and session; `log_offset` is where its output starts
    in `stderr_file`."""

    name: str
    pid: int
    stderr_file: Path
    started_at: float
    log_offset: int = 0
    returncode: int | None = None

    def signal_group(self, signum: int) -> None:
        """Send a signal to the whole process group, if there still is one."""
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return

    def dump_stacks(self) -> None:
        """Make a stuck child write the stacks of its threads to its stderr (it runs with PYTHONFAULTHANDLER=1)."""
        try:
            os.kill(self.pid, signal.SIGABRT)
        except ProcessLookupError:
            return


def spawn(
    name: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    events: SimpleQueue[Event],
    now: float,
    inherited_fds: Sequence[int] = (),
) -> Child:
    """Start `argv` with stdout and stderr appended to files in `folder`; its end becomes a `ChildExited` in `events`.

    Raises:
        OSError: the program cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stderr_file = folder / "stderr.log"
    with _append(folder / "stdout.log") as out, _append(stderr_file) as err:
        log_offset = err.tell()
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=tuple(inherited_fds),
        )
    child = Child(name, process.pid, stderr_file, now, log_offset)

    def wait() -> None:
        child.returncode = process.wait()
        events.put(ChildExited(name, child.returncode))

    threading.Thread(target=wait, name=f"wait-{name}", daemon=True).start()
    return child


def describe_exit(returncode: int) -> str:
    """`exit code 1` or `killed by SIGKILL`, with the usual suspect for SIGKILL."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory? see the kernel log)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _append(file: Path) -> BinaryIO:
    return file.open("ab")
