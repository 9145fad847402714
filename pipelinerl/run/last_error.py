"""The last error in the logs of a process, short enough for a message that says why a job exited."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipelinerl.domains.user_task import FOREIGN

_TAIL_BYTES = 2 * 2**20
_TRACEBACK = "Traceback (most recent call last):"
# Prefixes of a line: the process that wrote it, and the head of an error record (vLLM repeats it on every line).
_PREFIX = re.compile(
    r"^(?:\((?:[\w\-]+ )*(pid=\d+)\) ?|\[rank\d+\]:\s?)?(?:(?:ERROR|CRITICAL) [\d\-]+ [\d:.,]+ \[[^\]]*\]\s?)?"
)
# Records less severe than an error, by logging (ours, vLLM's, DeepSpeed's), glog and warnings; progress bars.
_QUIET = re.compile(
    r"^(?:\[?\d[\d\-:.,T]*(?: [\d:.,]+)?\]? )?\[?(?:DEBUG|INFO|WARNING)\b"
    r"|^\[?[IW]\d{4} \d\d:"
    r"|^\S+:\d+: \w*Warning: "
    r"|\d%\||\[\d+:\d\d(?::\d\d)?(?:<|, )"
)
_COMPLAINT = re.compile(
    r"error|fatal|critical|exception|fail|abort|cannot|can't|unable|denied|refused|killed|panic|segmentation|not found"
    r"|missing|invalid|unrecognized|no space|no such|out of memory|terminated",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Failed)\b.*")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:,? in |$)')
# A dump of stacks by faulthandler, innermost frame first.
_DUMP, _DUMP_FRAME = "(most recent call first):", re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$')
_MAX_FRAMES = 5
_DEATH = re.compile(r".*\bdied unexpectedly\b.*")
# Last words of the interpreter and of the C++ runtime before a signal.
_CRASH = re.compile(r"^(?:Fatal Python error: |terminate called )")
_CONSEQUENCES = (
    *("See root cause above", "See stack trace for root cause", "Engine core initialization failed"),
    *("EngineDeadError", "CancelledError"),
)
# What libraries print while the interpreter shuts down; never the cause.
_NOISE = re.compile(r"nanobind|^ - (?:leaked|\.\.\.)|resource_tracker|^\s+warnings\.warn\(")
_USER_ERROR = "error: "
_MAX_CHARS = 2000
# pydantic: the field on its own line, the reason below it, then a link.
_FIELDS = re.compile(r"\b\d+ validation errors? for ")
_INPUT = re.compile(r"\s*\[type=.*")
_LINK = "For further information visit "
_MAX_DETAILS = 4
_MAX_DETAIL_CHARS = 500
_MAX_LINES_BELOW = 30


class _Line(str):
    """A line without its prefix. `process`: the writer that the prefix names; empty: the process itself."""

    process = ""

    def of(self, process: str) -> _Line:
        self.process = process
        return self


@dataclass(frozen=True)
class LogPart:
    """What one process wrote to a log: `file` from byte `offset` on."""

    file: Path
    offset: int = 0


def last_error(*parts: LogPart) -> str:
    """The last error of a process, as a few lines.

    Exception and place of the last traceback (and of the one before, often its cause). If several processes share the
    logs, the one whose tracebacks end first comes first: it most likely failed first, and the others are mostly
    consequences. Without a traceback, the last lines that look like an error, or else those above warning level.

    Args:
        parts: the logs of the process, the most telling one last if there are tracebacks in several.
    """
    logs = [_read(part) for part in parts]
    errors = [error for lines in logs for error in _exceptions(lines)]
    deaths = {error.process: index for index, error in enumerate(errors)}
    in_order = dict.fromkeys(sorted(errors, key=lambda error: deaths[error.process]))
    causes = [error for error in in_order if not any(word in error for word in _CONSEQUENCES)]
    if errors:
        first = [error for error in causes if error.process == causes[0].process]
        others = [error for error in causes if error.process != causes[0].process]
        return "\n".join([*first[-2:], *others[-1:]] or errors[:1])[-_MAX_CHARS:]
    loud = [_loud(lines) for lines in reversed(logs)]
    for lines in loud:
        if complaints := [line for line in lines if _COMPLAINT.search(line)]:
            return "\n".join(complaints[-5:])[-_MAX_CHARS:]
    names = " or ".join(part.file.name for part in parts)
    none = f"it wrote {'no error' if any(logs) else 'nothing'} to {names}"
    last = next(filter(None, loud), [])[-5:]
    return "\n".join([f"{none}; its last lines:", *last])[-_MAX_CHARS:] if last else none


def crash_note(*parts: LogPart) -> str | None:
    """What a process killed by a signal still wrote about it; None if nothing. Older errors in its logs are
    unrelated."""
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
    """Where a process was that dumped its stacks: the line of user code, if any, and the innermost frames of the
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


def _read(part: LogPart) -> list[_Line]:
    return [line for line in _tail(part) if not _NOISE.search(line)]


def _tail(part: LogPart) -> list[_Line]:
    try:
        with part.file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(part.offset, size - _TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    lines = [line.rstrip() for line in data.decode("utf-8", errors="replace").splitlines()]
    prefixes = [_PREFIX.match(line) for line in lines]
    found = [_Line(line[each.end() :]).of(each[1] or "") for line, each in zip(lines, prefixes, strict=True) if each]
    return [line for line in found if line]


def _loud(lines: Sequence[str]) -> list[str]:
    """Lines that may report an error: no records below that level, no source lines under a warning."""
    found, is_warned = [], False
    is_usage = False
    for line in lines:
        # argparse prints its usage above the error, over several indented lines.
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


def _exceptions(lines: Sequence[_Line]) -> list[_Line]:
    """`exception text (file:line)` of every traceback and every notice of a dead process, in order."""
    found: list[_Line] = []
    places: dict[str, str] = {}  # of the tracebacks that have begun, by process: their lines may alternate
    for index, line in enumerate(lines):
        if _QUIET.search(line) and not _EXCEPTION.match(line):
            continue
        if line.endswith(_TRACEBACK):
            places[line.process] = ""
            continue
        frame, place = _FRAME.match(line), places.get(line.process)
        if place is None:
            if _DEATH.match(line):
                found.append(line)
        elif frame:
            places[line.process] = f"{frame.group(1)}:{frame.group(2)}"
        elif not line.startswith(" ") and (_EXCEPTION.match(line) or place):
            del places[line.process]
            text = _with_details(line, [each for each in lines[index + 1 :] if each.process == line.process])
            found.append(_Line(f"{text} ({place})" if place else text).of(line.process))
    return found


def _with_details(line: str, rest: Sequence[str]) -> str:
    """`line`, the first of an exception's message, joined with the reasons indented below it."""
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
