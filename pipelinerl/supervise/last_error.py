"""The last error in a log file, short enough for one message. Used by the supervisor to say why a job ended."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\((?:\w+ )*pid=\d+\)\s*(?:[A-Z]+ [\d\-]+ [\d:.,]+ \[[^\]]*\]\s?)?")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Failed)\b.*")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:, in |$)')
_SECONDARY = ("See root cause above", "Engine core initialization failed")
_USER_ERROR = "error: "
_MAX_CHARS = 2000


def last_error(log_file: Path, offset: int = 0) -> str:
    """What a process last complained about, as one to six lines.

    The exception and place of the last traceback (and of the one before, often its cause); without a traceback, the
    last lines. `offset` skips what an earlier process wrote. An empty file gives an explanation instead.
    """
    lines = _tail(log_file, offset)
    if not lines:
        return f"it wrote nothing to {log_file.name}"
    errors = _exceptions(lines)
    text = "\n".join(errors[-2:]) if errors else "\n".join(lines[-5:])
    return text[-_MAX_CHARS:]


def user_error(log_file: Path, offset: int = 0) -> str | None:
    """The message after `error: ` that a role with exit code 2 printed, or None."""
    lines = _tail(log_file, offset)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith(_USER_ERROR):
            return "\n".join(lines[index:]).removeprefix(_USER_ERROR)[:_MAX_CHARS]
    return None


def _tail(log_file: Path, offset: int) -> list[str]:
    try:
        with log_file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - _TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    lines = [_PREFIX.sub("", line.rstrip()) for line in data.decode("utf-8", errors="replace").splitlines()]
    return [line for line in lines if line]


def _exceptions(lines: list[str]) -> list[str]:
    """`exception text (file:line)` of every traceback, in order, without repeats and without mere consequences."""
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
            if entry not in found and not any(word in line for word in _SECONDARY):
                found.append(entry)
    return found
