"""Starts and ends the processes in which foreign code runs: graders and games. Called by their pools.

A child talks over one inherited socket, has none of the run's secrets, and is the head of a process group of its own.
Waits for the start of a process, and for its end after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL", "REDIS_URL", "DEATH_FD")


@dataclass(eq=False)
class Child:
    """A running child and the two ends of its socket on this side."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self) -> None:
        """Kill the process and all that it started, and wait until it is gone."""
        self.writer.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


async def start_child(module: str, memory_bytes: int) -> Child:
    """Run `python -m module` with a socket to this process.

    Args:
        memory_bytes: address space that it may have.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
            *("--memory-bytes", str(memory_bytes)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**without_secrets(os.environ), "OMP_NUM_THREADS": "1", "PYTHONPATH": _import_path()},
            start_new_session=True,
        )
    ours.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return Child(process, reader, writer)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Children handle text from strangers: keys and tokens stay out of their reach."""
    return {key: value for key, value in environ.items() if not any(word in key.upper() for word in _SECRET_WORDS)}


def _import_path() -> str:
    """Foreign code is found where this process finds its modules."""
    return os.pathsep.join(folder for folder in sys.path if folder)
