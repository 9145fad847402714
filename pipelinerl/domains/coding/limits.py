"""What a program may use, and how its run ended. Plain data, shared by the local sandbox and SandboxFusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
