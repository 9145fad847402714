"""The last error in the logs of a process, short enough for one message that says why a job ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipelinerl.domains.registry import FOREIGN

_TAIL_BYTES = 2 * 2**20
_TRACEBACK = "Traceback (most recent call last):"
# Prefixes of a line: the process that wrote it, and the head of an error record (vLLM repeats it on every line).
_PREFIX = re.compile(
    r"^(?:\((?:\w+ )*pid=\d+\) ?|\[rank\d+\]:\s?)?(?:(?:ERROR|CRITICAL) [\d\-]+ [\d:.,]+ \[[^\]]*\]\s?)?"
)
# Records less severe than an error, by logging (ours, vLLM's, DeepSpeed's), glog and warnings; progress bars.
_QUIET = re.compile(
    r"^(?:\[?\d[\d\-:.,T]*(?: [\d:.,]+)?\]? )?\[?(?:DEBUG|INFO|WARNING)\b"
    r"|^\[?[IW]\d{4} \d\d:"
    r"|^\S+:\d+: \w*Warning: "
    r"|\d%\|"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Failed)\b.*")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:,? in |$)')
# A dump of stacks by faulthandler, innermost frame first.
_DUMP, _DUMP_FRAME = "(most recent call first):", re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$')
_MAX_FRAMES = 5
_DEATH = re.compile(r".*\bdied unexpectedly\b.*")
# The interpreter's and the C++ runtime's last words before a signal.
_CRASH = re.compile(r"^(?:Fatal Python error: |terminate called )")
_CONSEQUENCES = ("See root cause above", "Engine core initialization failed", "EngineDeadError", "CancelledError")
# What libraries print while an interpreter shuts down; never why it did.
_NOISE = re.compile(r"nanobind|^ - (?:leaked|\.\.\.)|resource_tracker|^\s+warnings\.warn\(")
_USER_ERROR = "error: "
_MAX_CHARS = 2000
# pydantic: the name of a field on a line of its own, the reason below it, then where to read more.
_FIELDS = re.compile(r"\b\d+ validation errors? for ")
_INPUT = re.compile(r"\s*\[type=.*")
_LINK = "For further information visit "
_MAX_DETAILS = 4
_MAX_DETAIL_CHARS = 500
_MAX_LINES_BELOW = 30


@dataclass(frozen=True)
class LogPart:
    """What one process wrote to a log: `file` from the byte `offset` on."""

    file: Path
    offset: int = 0


def last_error(*parts: LogPart) -> str:
    """What a process last complained about, as one to five lines.

    The exception and place of the last traceback (and of the one before, often its cause), from whichever log has one;
    without a traceback, the last lines of a log that are not mere information or warnings.

    Args:
        parts: the logs of the process, the most telling one last if there are tracebacks in several.
    """
    logs = [_read(part) for part in parts]
    errors = [error for lines in logs for error in _exceptions(lines)]
    causes = [error for error in errors if not any(word in error for word in _CONSEQUENCES)]
    if errors:
        return "\n".join(causes[-2:] or errors[:1])[-_MAX_CHARS:]
    for lines in reversed(logs):
        if loud := _loud(lines):
            return "\n".join(loud[-5:])[-_MAX_CHARS:]
    names = " or ".join(part.file.name for part in parts)
    return f"it wrote {'no error' if any(logs) else 'nothing'} to {names}"


def crash_note(*parts: LogPart) -> str | None:
    """What a process that a signal ended could still say of it; None if it had no chance to.

    Older errors in its logs are not why it ended.
    """
    notes = []
    for lines in (_read(part) for part in parts):
        for index, line in enumerate(lines):
            if _CRASH.match(line):
                frame = next(filter(None, map(_FRAME.match, lines[index + 1 :])), None)
                place = f" ({frame.group(1)}:{frame.group(2)})" if frame else ""
                notes.append(f"{_with_details(line, lines[index + 1 :])}{place}")
            elif _DEATH.match(line):
                notes.append(line)
    return notes[-1][-_MAX_CHARS:] if notes else None


def stack_note(part: LogPart) -> str:
    """Where a process was that dumped its stacks: the user's own line, if there is one, and the innermost frames of the
    running thread."""
    threads: list[list[str]] = []
    running = 0
    for line in _tail(part):
        if line.endswith(_DUMP):
            running = len(threads) if line.startswith("Current thread ") else running
            threads.append([])
        elif threads and (frame := _DUMP_FRAME.match(line)):
            threads[-1].append(f"{frame.group(1)}:{frame.group(2)} in {frame.group(3)}")
    if not any(threads):
        return f"It left no stacks: {last_error(part)}"
    threads.insert(0, threads.pop(running))
    own = next((frame for frames in threads for frame in frames if not frame.startswith(FOREIGN)), None)
    note = "\n".join(["Where it was at the end:", *threads[0][:_MAX_FRAMES]])
    return f"Your code was at {own}\n{note}" if own is not None else note


def user_error(part: LogPart) -> str | None:
    """The message after `error: ` that a role with exit code 2 printed, or None."""
    lines = _tail(part)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith(_USER_ERROR):
            return "\n".join(lines[index:]).removeprefix(_USER_ERROR)[:_MAX_CHARS]
    return None


def _read(part: LogPart) -> list[str]:
    return [line for line in _tail(part) if not _NOISE.search(line)]


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


def _loud(lines: Sequence[str]) -> list[str]:
    """Lines that may speak of an error: no record below one, and no source line below a warning."""
    found, is_warned = [], False
    is_usage = False
    for line in lines:
        # What argparse writes above its error: the whole command line, over several indented lines.
        is_usage = line.startswith("usage: ") or (is_usage and line.startswith(" "))
        if is_usage:
            continue
        if _QUIET.search(line):
            is_warned = "Warning: " in line
        elif is_warned and line.startswith(" "):
            is_warned = False
        else:
            found.append(line)
            is_warned = False
    return found


def _exceptions(lines: Sequence[str]) -> list[str]:
    """`exception text (file:line)` of every traceback and every note of a death, in order, without repeats."""
    found: list[str] = []
    place, inside = "", False
    for index, line in enumerate(lines):
        if _QUIET.search(line) and not _EXCEPTION.match(line):
            continue
        if line.endswith(_TRACEBACK):
            place, inside = "", True
            continue
        frame = _FRAME.match(line)
        if inside and frame:
            place = f"{frame.group(1)}:{frame.group(2)}"
        elif inside and not line.startswith(" ") and (_EXCEPTION.match(line) or place):
            inside = False
            text = _with_details(line, lines[index + 1 :])
            entry = f"{text} ({place})" if place else text
            if entry not in found:
                found.append(entry)
        elif not inside and _DEATH.match(line) and line not in found:
            found.append(line)
    return found


def _with_details(line: str, rest: Sequence[str]) -> str:
    """`line`, the first of an exception's message, with the reasons that stand indented below it, on one line."""
    details: list[str] = []
    names_fields = bool(_FIELDS.search(line))
    field = ""
    for below, after in pairwise((*rest[:_MAX_LINES_BELOW], "")):
        if _QUIET.search(below) or below.endswith(_TRACEBACK) or _FRAME.match(below):
            break
        if not below.startswith((" ", "\t")):
            if not names_fields or not _INPUT.search(after):
                break
            field = f"{below}: "
        elif _LINK not in below:
            details.append(f"{field}{_INPUT.sub('', below.strip())}")
            field = ""
    if not details:
        return line
    text = "; ".join(details[:_MAX_DETAILS])
    if len(details) > _MAX_DETAILS or len(text) > _MAX_DETAIL_CHARS:
        text = f"{text[:_MAX_DETAIL_CHARS]} ..."
    return f"{line.rstrip(':')}: {text}"
