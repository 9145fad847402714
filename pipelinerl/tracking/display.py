"""What the terminal shows while a run goes on: a table that redraws itself, or plain lines.

Called by the collector. The live table waits for its refresh interval in a thread of its own (rich's); the plain form
prints when something happened, and a thread of its own waits for the next line and prints one if none comes for long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipelinerl.records import EvaluationResult, MetricRecord
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.table import evaluation_line, progress_line, render_table

logger = logging.getLogger(__name__)

REFRESHES_PER_SECOND = 2
PLAIN_INTERVAL_S = 1.0
#: Plain output says what is waited for when it had no line for so long.
QUIET_INTERVAL_S = 20.0
_JOIN_S = 5.0  # a terminal may hold up a line for ever


class Display(Protocol):
    """Shows a run. `snapshot` runs a function on the state while nobody changes it."""

    def start(self, snapshot: Callable[[Callable[[RunState], object]], object]) -> None: ...

    def step_recorded(self, state: RunState, record: MetricRecord) -> None:
        """The trainer's numbers of a step arrived."""
        ...

    def notice(self, text: str) -> None:
        """Something that the user should know now."""
        ...

    def evaluated(self, state: RunState, result: EvaluationResult) -> None: ...

    def stop(self) -> None: ...


class LiveDisplay:
    """The table, redrawn twice a second."""

    def __init__(self, stream: TextIO, title: str, max_steps: int | None) -> None:
        self._console = Console(file=stream)
        self._title, self._max_steps = title, max_steps
        self._live: Live | None = None

    def start(self, snapshot: Callable[[Callable[[RunState], object]], object]) -> None:
        def render() -> Table:
            table = snapshot(lambda state: render_table(state, self._title, self._max_steps))
            assert isinstance(table, Table)
            return table

        self._live = Live(console=self._console, get_renderable=render, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()

    def step_recorded(self, state: RunState, record: MetricRecord) -> None:
        """Nothing to do: the next refresh shows it."""

    def evaluated(self, state: RunState, result: EvaluationResult) -> None:
        """Nothing to do: the next refresh shows it."""

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)  # rich puts it above the table

    def stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class PlainDisplay:
    """One line a step (at most one a second, and the last one), one an evaluation, and one when there was none for
    `quiet_interval_s`.

    `describe` says what the run is doing then; without it there are no such lines.
    """

    def __init__(
        self,
        stream: TextIO,
        max_steps: int | None,
        clock: Callable[[], float] = time.monotonic,
        describe: Callable[[RunState], str] | None = None,
        quiet_interval_s: float = QUIET_INTERVAL_S,
    ) -> None:
        self._stream, self._max_steps, self._clock = stream, max_steps, clock
        self._describe, self._quiet_interval_s = describe, quiet_interval_s
        self._last = -PLAIN_INTERVAL_S
        self._news = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, snapshot: Callable[[Callable[[RunState], object]], object]) -> None:
        """Lines come with the records; from now on also when there are none."""
        if self._describe is not None:
            self._thread = threading.Thread(target=self._fill, args=(snapshot,), name="quiet-lines", daemon=True)
            self._thread.start()

    def _fill(self, snapshot: Callable[[Callable[[RunState], object]], object]) -> None:
        assert self._describe is not None
        while True:
            with self._news:
                if self._stopped:
                    return
                if self._news.wait(self._quiet_interval_s):
                    continue
            try:
                # Not under the lock of the lines: whoever prints one may hold the state's.
                self._print(str(snapshot(self._describe)))
            except (OSError, ValueError) as error:  # a terminal that was closed
                logger.warning("there are no more lines about waits: %s", error)
                return

    def step_recorded(self, state: RunState, record: MetricRecord) -> None:
        now = self._clock()
        if now - self._last >= PLAIN_INTERVAL_S or record.step == self._max_steps:
            self._last = now
            self._print(progress_line(state, self._max_steps, record))

    def evaluated(self, state: RunState, result: EvaluationResult) -> None:
        self._print(evaluation_line(result))

    def notice(self, text: str) -> None:
        self._print(text)

    def stop(self) -> None:
        """No more lines about waits; every other one was flushed."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _print(self, line: str) -> None:
        with self._news:
            self._stream.write(line + "\n")
            self._stream.flush()
            self._news.notify_all()


def make_display(
    stream: TextIO, title: str, max_steps: int | None, describe: Callable[[RunState], str] | None = None
) -> Display:
    """The table where the terminal can redraw, lines elsewhere."""
    if stream.isatty() and Console(file=stream).is_terminal and not Console(file=stream).is_dumb_terminal:
        return LiveDisplay(stream, title, max_steps)
    return PlainDisplay(stream, max_steps, describe=describe)
