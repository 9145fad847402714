"""What the terminal shows while a run goes on: a table that redraws itself, or plain lines.

Called by the collector. The live table waits for its refresh interval in a thread of its own (rich's); the plain form
prints when something happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipelinerl.records import EvaluationResult, MetricRecord
from pipelinerl.tracking.state import RunState
from pipelinerl.tracking.table import evaluation_line, progress_line, render_table

REFRESHES_PER_SECOND = 2
PLAIN_INTERVAL_S = 1.0


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
    """One line a step (at most one a second, and the last one) and one an evaluation."""

    def __init__(self, stream: TextIO, max_steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._max_steps, self._clock = stream, max_steps, clock
        self._last = -PLAIN_INTERVAL_S

    def start(self, snapshot: Callable[[Callable[[RunState], object]], object]) -> None:
        """Nothing to do: lines come with the records."""

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
        """Nothing to do: every line was flushed."""

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def make_display(stream: TextIO, title: str, max_steps: int | None) -> Display:
    """The table where the terminal can redraw, lines elsewhere."""
    if stream.isatty() and Console(file=stream).is_terminal and not Console(file=stream).is_dumb_terminal:
        return LiveDisplay(stream, title, max_steps)
    return PlainDisplay(stream, max_steps)
