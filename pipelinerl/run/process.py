"""One child process of the launcher: started in a session of its own, output in files, its end put on a queue.

A thread per child sleeps in `wait`, so nothing polls. The child inherits the read end of the launcher's death pipe.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import msgspec

from pipelinerl.records.pool import PoolAnswer
from pipelinerl.run.last_error import LogPart, crash_note, last_error

logger = logging.getLogger(__name__)


class ChildExited(msgspec.Struct, frozen=True):
    """A child ended. `returncode` is negative for the signal that killed it."""

    name: str
    returncode: int


class Interrupted(msgspec.Struct, frozen=True):
    """The launcher got a signal."""

    signum: int


class PoolAnswered(msgspec.Struct, frozen=True):
    """The trainer said something about a server."""

    answer: PoolAnswer


class StreamFailed(msgspec.Struct, frozen=True):
    """The launcher can follow a stream no longer."""

    reason: str


class NodeEnded(msgspec.Struct, frozen=True):
    """The run is over on another node, and has to be on this one."""

    status: Literal["completed", "failed", "interrupted"]
    reason: str | None
    exit_code: int


class NodeSaved(msgspec.Struct, frozen=True):
    """No trainer of another node is left to save, or the run is over there."""

    rank: int


Event = ChildExited | Interrupted | PoolAnswered | StreamFailed | NodeEnded | NodeSaved


@dataclass
class Child:
    """A running child. `pid` is also the id of its process group and session; `stdout` and `stderr` are its part of
    the job's logs (an earlier process of the same job wrote the part before)."""

    name: str
    pid: int
    stdout: LogPart
    stderr: LogPart
    started_at: float
    returncode: int | None = None
    #: The launcher itself sent it a signal.
    is_signalled: bool = False

    def last_words(self) -> str:
        """` Last error: ...`; empty if a signal of somebody else gave it no chance to say why it ends."""
        if self.returncode is None or self.returncode >= 0 or self.is_signalled:
            return f" Last error: {last_error(self.stdout, self.stderr)}"
        note = crash_note(self.stdout, self.stderr)
        return f" Last error: {note}" if note else ""

    def signal_group(self, signum: int) -> None:
        """Send a signal to the whole process group, if there still is one."""
        self.is_signalled = True
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """Kill the process and what is in its group."""
        self.signal_group(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to the process alone, not to its helpers."""
        self.is_signalled = True
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return

    def dump_stacks(self) -> None:
        """Make a stuck child write the stacks of its threads to its stderr (it runs with PYTHONFAULTHANDLER=1)."""
        self.is_signalled = True
        try:
            os.kill(self.pid, signal.SIGABRT)
        except ProcessLookupError:
            return


def dump_stacks_of(children: Iterable[Child]) -> None:
    """Before children that do not end are killed: their stacks say what they hang in (a collective, for instance)."""
    for child in children:
        logger.warning("%s does not end; where its threads are is in %s", child.name, child.stderr.file)
        child.dump_stacks()


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
    stdout_file, stderr_file = folder / "stdout.log", folder / "stderr.log"
    with stdout_file.open("ab") as out, stderr_file.open("ab") as err:
        stdout, stderr = LogPart(stdout_file, out.tell()), LogPart(stderr_file, err.tell())
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=tuple(inherited_fds),
        )
    child = Child(name, process.pid, stdout, stderr, now)

    def wait() -> None:
        child.returncode = process.wait()
        events.put(ChildExited(name, child.returncode))

    threading.Thread(target=wait, name=f"wait-{name}", daemon=True).start()
    return child


def describe_exit(returncode: int) -> str:
    """`exit code 1` or `killed by SIGKILL` (what follows `ended with` or `was`), with the usual suspect for SIGKILL."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory? see the kernel log)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
