"""The last error in the logs of a process, short enough for one message. Used to say why a job ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 2 * 2**20
_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\((?:\w+ )*pid=\d+\)\s*(?:[A-Z]+ [\d\-]+ [\d:.,]+ \[[^\]]*\]\s?)?")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Failed)\b.*")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:, in |$)')
_DEATH = re.compile(r".*\bdied unexpectedly\b.*")
_CONSEQUENCES = ("See root cause above", "Engine core initialization failed", "EngineDeadError", "CancelledError")
# What libraries print while an interpreter shuts down; never why it did.
_NOISE = re.compile(r"nanobind|^ - (?:leaked|\.\.\.)|resource_tracker|^\s+warnings\.warn\(")
_USER_ERROR = "error: "
_MAX_CHARS = 2000


@dataclass(frozen=True)
class LogPart:
    """What one process wrote to a log: `file` from the byte `offset` on."""

    file: Path
    offset: int = 0


def last_error(*parts: LogPart) -> str:
    """What a process last complained about, as one to five lines.

    The exception and place of the last traceback (and of the one before, often its cause), from whichever log has one;
    without a traceback, the last lines of the first log that has any.

    Args:
        parts: the logs of the process, the most telling one last if there are tracebacks in several.
    """
    logs = [[line for line in _tail(part) if not _NOISE.search(line)] for part in parts]
    errors = [error for lines in logs for error in _exceptions(lines)]
    causes = [error for error in errors if not any(word in error for word in _CONSEQUENCES)]
    if errors:
        return "\n".join(causes[-2:] or errors[:1])[-_MAX_CHARS:]
    for lines in reversed(logs):
        if lines:
            return "\n".join(lines[-5:])[-_MAX_CHARS:]
    return f"it wrote nothing to {' or '.join(part.file.name for part in parts)}"


def user_error(part: LogPart) -> str | None:
    """The message after `error: ` that a role with exit code 2 printed, or None."""
    lines = _tail(part)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith(_USER_ERROR):
            return "\n".join(lines[index:]).removeprefix(_USER_ERROR)[:_MAX_CHARS]
    return None


def _tail(part: LogPart) -> list[str]:
    try:
        with part.file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(part.offset, size - _TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    lines = [_PREFIX.sub("", line.rstrip()) for line in data.decode("utf-8", errors="replace").splitlines()]
    return [line for line in lines if line]


def _exceptions(lines: list[str]) -> list[str]:
    """`exception text (file:line)` of every traceback and every note of a death, in order, without repeats."""
    found: list[str] = []
    place, inside = "", False
    for line in lines:
        if line.endswith(_TRACEBACK):
            place, inside = "", True
            continue
        frame = _FRAME.match(line)
        if inside and frame:
            place = f"{frame.group(1)}:{frame.group(2)}"
        elif inside and not line.startswith(" ") and (_EXCEPTION.match(line) or place):
            inside = False
            entry = f"{line} ({place})" if place else line
            if entry not in found:
                found.append(entry)
        elif not inside and _DEATH.match(line) and line not in found:
            found.append(line)
    return found
