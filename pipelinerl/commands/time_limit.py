"""Ends code of the user's that holds the process, and says where it was. Called by the command `check-domain`.

Works in the main thread, with a timer of the system whose signal interrupts the code. Code that holds the interpreter
in an extension hears no signal: faulthandler then writes its place and ends the process. Waits for the code inside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType

from pipelinerl.errors import DomainError

_REPEAT_S = 5.0  # code that swallows the interruption meets it again
_LAST_RESORT_S = 20.0
_FRAMES = 6


class _TimeIsUp(BaseException):
    """Raised inside foreign code. Not an `Exception`, so that `except Exception` does not stop it."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str, next_step: str) -> Iterator[None]:
    """Run the code inside for at most `seconds`.

    Raises:
        DomainError: it took longer; `what` is the subject of the message, `next_step` its end.
    """
    place: list[str] = []
    is_inside = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not is_inside:
            return
        place[:] = place or [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_stack(frame)[-_FRAMES:]]
        raise _TimeIsUp

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
    faulthandler.dump_traceback_later(seconds + _LAST_RESORT_S, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    except _TimeIsUp:
        where = "\n  ".join(place)
        raise DomainError(f"{what} took more than {seconds:g} s. {next_step} It was here:\n  {where}") from None
    finally:
        is_inside = False
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in whatever runs inside. asyncio would only cancel its main task, which code
    that blocks never lets happen; it leaves handlers alone that are not Python's own."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
