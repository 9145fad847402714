"""What the terminal shows during a run: a live table, or plain lines where the terminal cannot redraw.

Plain output has a line per step and per evaluation, and one about what the run waits for if there was none for a while.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import monotonic
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipelinerl.config import RunConfig
from pipelinerl.records import EvaluationResult, MetricRecord
from pipelinerl.rundir.heartbeat import HeartbeatState, read_heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.tracking.state import REWARD, SUCCESS, RunState
from pipelinerl.world import Job

logger = logging.getLogger(__name__)

REFRESHES_PER_SECOND = 2
PLAIN_INTERVAL_S = 1.0
#: Plain output says what the run waits for after so long without a line.
QUIET_INTERVAL_S = 20.0
#: How often a run that only evaluates reports its progress.
EVALUATION_INTERVAL_S = 5.0
_SERVER_BUSY = re.compile(r"actor/server_busy_(\d+)")
_NONE = "-"
_STEPS_OF_ETA = 10
_MAX_NAMED = 4
_LONG_WAIT_S = 5.0
_JOIN_S = 5.0  # a terminal may block a line forever

#: Runs a function on the state while nobody changes it.
Snapshot = Callable[[Callable[[RunState], Any]], Any]


def table_rows(state: RunState, max_steps: int | None) -> list[tuple[str, str]]:
    """(label, text) of every row; unknown numbers are dashes."""
    number = partial(_number, state)
    servers = sorted((int(m[1]), value) for name, value in state.latest.items() if (m := _SERVER_BUSY.fullmatch(name)))
    step = f"{state.steps}/{max_steps}" if max_steps else f"{state.steps}"
    seconds = step_seconds(state)
    pace = _NONE if seconds is None else f"{seconds:.2f} s/step"
    if seconds is not None and max_steps:
        pace += f", {_duration(seconds * max(0, max_steps - state.steps))} left"
    waits = f"trainer {number('finetune/wait_data_s', form='.1f')} s, servers {_idle_s(state)} s"
    answers = f"{number('actor/output_tokens_per_rollout', form='.0f')} tokens"
    if cut := state.latest.get("preprocessor/cut_fraction"):
        answers += f", {cut:.0%} cut off"
    tokens, rollouts = number("actor/output_tokens_per_s", form=".0f"), number("actor/rollouts_per_s", form=".1f")
    samples, loss = number("finetune/samples_per_s", form=".1f"), number("finetune/loss", form=".4g")
    gradient = number("finetune/grad_norm", form=".3g")
    mean, most = number("finetune/lag_mean_versions", form=".2f"), number("finetune/lag_max_versions", form=".0f")
    update = f"version {state.version}, {_update_s(state)} s" if state.version is not None else _NONE
    return [
        ("step", f"{step}   ({_duration(state.training_seconds)} of training)"),
        ("pace", pace),
        ("reward, training", _last(state.curve(REWARD))),
        ("success, training", _last(state.curve(SUCCESS))),
        ("success, held out", _held_out(state)),
        ("answers", answers),
        ("sampling", f"{tokens} tokens/s, {rollouts} rollouts/s"),
        ("training", f"{samples} samples/s, loss {loss}, gradient norm {gradient}"),
        ("lag (versions)", f"mean {mean}, max {most}"),
        ("ESS", f"{number('finetune/ess')}, after clamping {number('finetune/ess_after_clamp')}"),
        ("servers", ", ".join(f"{index}: {busy:.0f} running" for index, busy in servers) or _NONE),
        ("waits in a step", waits),
        ("last weight update", update),
        ("samples", ", ".join(f"{count} {fate}" for fate, count in sorted(state.fates.items())) or _NONE),
    ]


def render_table(state: RunState, title: str, max_steps: int | None) -> Table:
    """The live table."""
    table = Table(title=title, show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in table_rows(state, max_steps):
        table.add_row(label, text)
    return table


def progress_line(state: RunState, max_steps: int | None, record: MetricRecord) -> str:
    """The step of `record` as one line, with reward and success as in the table and the plot."""
    step, number = record.step, partial(_number, state)
    # The trainer's metrics may come before its message that the step is done.
    reward, success, cut = (
        state.by_step(names).get(step) for names in (REWARD, SUCCESS, ("preprocessor/cut_fraction",))
    )
    seconds = step_seconds(state)
    parts = [
        f"step {f'{step}/{max_steps}' if max_steps else step}",
        f"{_NONE if seconds is None else f'{seconds:.2f}'} s/step",
        *([f"{_duration(seconds * (max_steps - step))} left"] if seconds is not None and max_steps else []),
        f"reward {_NONE if reward is None else f'{reward:.3f}'}",
        f"success {_NONE if success is None else f'{success:.3f}'}",
        f"{number('actor/output_tokens_per_rollout', form='.0f')} tokens" + (f", {cut:.0%} cut" if cut else ""),
        f"lag {number('finetune/lag_mean_versions', form='.2f')}",
        f"ESS {number('finetune/ess')}",
        f"waits {number('finetune/wait_data_s', form='.1f')} s, servers {_idle_s(state)} s",
        f"update {_update_s(state)} s",
    ]
    if "finetune/gpu_memory_peak_gib" in state.latest:
        parts.append(f"{number('finetune/gpu_memory_peak_gib', form='.1f')} GiB")
    return " | ".join(parts)


def step_seconds(state: RunState) -> float | None:
    """Median seconds of the last ten steps; None before the first."""
    values = state.by_step(("finetune/step_s",))
    last = [values[step] for step in range(state.steps - _STEPS_OF_ETA + 1, state.steps + 2) if step in values]
    return median(last) if last else None


def evaluation_line(result: EvaluationResult) -> str:
    """One evaluation as one line."""
    kind = "final evaluation" if result.is_final else f"evaluation at version {result.due_version}"
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    found = "no rollout finished"
    if result.success_rate is not None and result.mean_reward is not None:
        found = f"success {result.success_rate:.3f}, reward {result.mean_reward:.3f}"
        if result.attempts > 1:
            best = result.estimates.get(f"pass_at_{result.attempts}")
            found += f", pass@{result.attempts} {best.value:.3f}" if best else ""
    return f"{kind} on {result.dataset_name}: {found} ({result.num_rollouts} rollouts{failed}, {result.seconds:.1f} s)"


def read_beats(run_dir: RunDir, jobs: Sequence[Job]) -> dict[str, HeartbeatState | None]:
    """The newest heartbeat of each of `jobs`; None where there is none since its start."""
    return {job.name: read_heartbeat(run_dir.heartbeat_file(job.name)) for job in jobs}


def quiet_line(state: RunState, config: RunConfig, beats: Mapping[str, HeartbeatState | None], run_s: float) -> str:
    """One line about what the run, `run_s` seconds after its start, is doing.

    `beats` has the newest heartbeat of each process, None before the first.
    """
    waits = [f"{name} is loading its libraries" for name, beat in beats.items() if beat is None]
    for name, beat in beats.items():
        if beat is not None and beat.waited_s is not None and beat.waited_s >= _LONG_WAIT_S:
            waits.append(f"{name} waits for {beat.waiting_for} ({beat.waited_s:.0f} s)")
    if config.debug.mode == "evaluation":
        text = _evaluated(state, run_s)
    elif state.phase == "done":
        text = "training is done, the last evaluation is running"
    elif state.phase == "starting":
        text = f"starting, {run_s:.0f} s so far"
    else:
        known = config.finetune.known_steps
        step = f"step {state.steps + 1}/{known}" if known else f"step {state.steps + 1}"
        text = f"{step}: {_ready(state)} of {config.finetune.samples_per_step} samples are ready, {_sampling(state)}"
    more = f", and {len(waits) - _MAX_NAMED} more" if len(waits) > _MAX_NAMED else ""
    return f"{text}; {', '.join(waits[:_MAX_NAMED])}{more}" if waits else text


def _evaluated(state: RunState, run_s: float) -> str:
    done, size = (state.latest.get(name, 0.0) for name in ("actor/evaluation_rollouts", "actor/evaluation_size"))
    return f"{done:.0f} of {size:.0f} rollouts, {run_s:.0f} s" if size else f"starting, {run_s:.0f} s so far"


def _last(curve: Mapping[int, float]) -> str:
    return f"{curve[max(curve)]:.3f}" if curve else _NONE


def _number(state: RunState, *names: str, form: str = ".3f") -> str:
    return next((format(state.latest[name], form) for name in names if name in state.latest), _NONE)


def _update_s(state: RunState) -> str:
    return f"{state.last_update_seconds.get('total', 0.0):.2f}"


def _held_out(state: RunState) -> str:
    measured = [(r, r.success_rate) for r in state.evaluations if r.success_rate is not None]
    if not measured:
        return _NONE
    last, success_rate = measured[-1]
    before = state.held_out_success("before")
    text = f"{success_rate:.3f} at version {last.max_version}"
    return f"{text}   ({before:.3f} before)" if before is not None and last.due_version > 0 else text


def _idle_s(state: RunState) -> str:
    """Mean seconds that a server had nothing to do since its last report."""
    idle = [value for name, value in state.latest.items() if "/server_idle_s_" in name]
    return f"{sum(idle) / len(idle):.1f}" if idle else _NONE


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _ready(state: RunState) -> str:
    """Number of samples in complete groups without a fate."""
    admitted, in_flight = state.latest.get("actor/admitted_samples"), state.latest.get("actor/in_flight_samples")
    return "?" if admitted is None or in_flight is None else f"{max(0.0, admitted - in_flight):.0f}"


def _sampling(state: RunState) -> str:
    latest = state.latest
    running = sum(value for name, value in latest.items() if _SERVER_BUSY.fullmatch(name))
    text = f"{latest.get('actor/rollouts_per_s', 0.0):.1f} rollouts/s, {running:.0f} running"
    failed = latest.get("actor/failed_rollouts", 0.0)
    return f"{text}, {failed:.0f} failed" if failed else text


class LiveDisplay:
    """The table, redrawn twice a second."""

    def __init__(self, stream: TextIO, title: str, max_steps: int | None) -> None:
        self._console = Console(file=stream)
        self._title, self._max_steps = title, max_steps
        self._live: Live | None = None

    def start(self, snapshot: Snapshot) -> None:
        def render() -> Table:
            table = snapshot(lambda state: render_table(state, self._title, self._max_steps))
            assert isinstance(table, Table)
            return table

        self._live = Live(console=self._console, get_renderable=render, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start()

    def step_recorded(self, state: RunState, record: MetricRecord) -> None:
        """The next refresh shows it."""

    def evaluated(self, state: RunState, result: EvaluationResult) -> None:
        """The next refresh shows it."""

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)  # rich puts it above the table

    def stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class PlainDisplay:
    """One line per step (at most one per second, and the last one) and per evaluation, and one by `describe` after
    `quiet_interval_s` without any.
    """

    def __init__(
        self,
        stream: TextIO,
        max_steps: int | None,
        describe: Callable[[RunState], str] | None = None,
        quiet_interval_s: float = QUIET_INTERVAL_S,
    ) -> None:
        self._stream, self._max_steps = stream, max_steps
        self._describe, self._quiet_interval_s = describe, quiet_interval_s
        self._last = -PLAIN_INTERVAL_S
        self._news = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, snapshot: Snapshot) -> None:
        """From now on there are lines by `describe`; the others come with the records."""
        if self._describe is not None:
            self._thread = threading.Thread(target=self._fill, args=(snapshot,), name="quiet-lines", daemon=True)
            self._thread.start()

    def _fill(self, snapshot: Snapshot) -> None:
        assert self._describe is not None
        while True:
            with self._news:
                if self._stopped:
                    return
                if self._news.wait(self._quiet_interval_s):
                    continue
            try:
                # Not under the lock of the lines: another thread may print with the state's lock.
                self._print(str(snapshot(self._describe)))
            except (OSError, ValueError) as error:  # a terminal that was closed
                logger.warning("lines about waits are off from now on: %s", error)
                return

    def step_recorded(self, state: RunState, record: MetricRecord) -> None:
        now = monotonic()
        if now - self._last >= PLAIN_INTERVAL_S or record.step == self._max_steps:
            self._last = now
            self._print(progress_line(state, self._max_steps, record))

    def evaluated(self, state: RunState, result: EvaluationResult) -> None:
        self._print(evaluation_line(result))

    def notice(self, text: str) -> None:
        self._print(text)

    def stop(self) -> None:
        """End the lines by `describe`; all others were flushed."""
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


Display = LiveDisplay | PlainDisplay


def make_display(stream: TextIO, title: str, config: RunConfig, describe: Callable[[RunState], str]) -> Display:
    """The table if the terminal can redraw; otherwise, and for an evaluation without steps, lines."""
    max_steps = config.finetune.known_steps
    if config.debug.mode == "evaluation":
        return PlainDisplay(stream, None, describe, EVALUATION_INTERVAL_S)
    if stream.isatty() and Console(file=stream).is_terminal and not Console(file=stream).is_dumb_terminal:
        return LiveDisplay(stream, title, max_steps)
    return PlainDisplay(stream, max_steps, describe)
