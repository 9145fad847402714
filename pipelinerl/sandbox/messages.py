"""What callers, verifier service and grader processes say to each other, and the frames between two processes.

Plain data in msgpack (JSON over HTTP): neither end can make the other one run anything. The two readers of frames wait
for the other end.
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any, Literal, get_args

import msgspec

from pipelinerl.errors import RetryableRolloutError, RolloutError

GradeStatus = Literal["correct", "wrong", "no_answer", "unparsable"]
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
_QUOTED_CHARACTERS = 300


class Grade(msgspec.Struct, frozen=True, tag="grade"):
    """What a grader says: `score` (1 is right), the kind of the answer, and numbers that go into the metrics.

    `status`: `correct`, `wrong`, `no_answer` (the text holds no answer) or `unparsable` (one that cannot be read).
    """

    score: float
    status: GradeStatus
    details: dict[str, float] = {}


class GradeFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The grader gave no grade. `reason` is a short word that is counted; the rollout is failed, never scored 0.

    `transient`: the reason may pass, so the rollout is tried again.
    """

    reason: str
    message: str = ""
    transient: bool = False


class GradeRequest(msgspec.Struct, tag="request"):
    """Grade `text` with the function at the dotted path `grader`; `timeout_s` is its deadline."""

    grader: str
    text: str
    problem: dict[str, Any]
    params: dict[str, Any] = {}
    timeout_s: float | None = None


class Load(msgspec.Struct, tag="load"):
    """To a grader process: import this grader now, so that importing does not count against a deadline."""

    grader: str


class Loaded(msgspec.Struct, tag="loaded"):
    grader: str


GradeAnswer = Grade | GradeFailed


def as_grade(value: Any) -> GradeAnswer:
    """Read what a grader returned: a `Grade` or a number. 0.0 stays 0.0; None, NaN and others are a failure."""
    if isinstance(value, Grade):
        fault = _fault_of(value)
        if fault is None:
            return value
        return GradeFailed("grader_bad_result", f"the grader returned {str(value)[:_QUOTED_CHARACTERS]}: {fault}")
    if _is_number(value):
        return Grade(float(value), "correct" if value >= 1 else "wrong")
    shown = repr(value)[:_QUOTED_CHARACTERS]
    return GradeFailed("grader_bad_result", f"the grader returned {shown}, expected a Grade or a finite number")


def _fault_of(grade: Grade) -> str | None:
    """What is wrong with a grade that a grader made; None if nothing is."""
    if not _is_number(grade.score):
        return f"score is {grade.score!r}, expected a finite number"
    if grade.status not in get_args(GradeStatus):
        return f"status is {grade.status!r}, expected one of {', '.join(map(repr, get_args(GradeStatus)))}"
    if not isinstance(grade.details, dict):
        return f"details are a {type(grade.details).__name__}, expected a dict of numbers for the metrics"
    for name, number in grade.details.items():
        if not isinstance(name, str) or not _is_number(number):
            return f"details has {name!r}: {number!r}, expected names with finite numbers"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def grade_or_raise(answer: GradeAnswer) -> Grade:
    """Return the grade.

    Raises:
        RolloutError: there is none; its reason is the failure's. `RetryableRolloutError` if that may pass.
    """
    if isinstance(answer, GradeFailed):
        raise (RetryableRolloutError if answer.transient else RolloutError)(answer.reason, answer.message)
    return answer


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no encoding can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def frame(payload: bytes) -> bytes:
    """Return `payload` behind its length."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


async def read_payload(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next payload, or None when the other end is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return await reader.readexactly(length) if length <= MAX_FRAME_BYTES else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_payload(connection: socket.socket) -> bytes | None:
    """The blocking form of `read_payload`."""
    header = _receive_exactly(connection, LENGTH_BYTES)
    if header is None:
        return None
    length = int.from_bytes(header, "big")
    return _receive_exactly(connection, length) if length <= MAX_FRAME_BYTES else None


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
