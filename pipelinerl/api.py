"""Runs from Python and notebooks: `pipelinerl.train`, `pipelinerl.evaluate`, `pipelinerl.Run`.

`train` and `evaluate` run the commands `launch` and `eval` in a subprocess and print their output. A `Run` reads a run
directory, even while the run is active. Tables are pandas data frames if pandas is installed, else lists of dicts.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.analysis.evaluate import default_output
from pipelinerl.analysis.sample_view import rows
from pipelinerl.analysis.samples import evaluations_of, read_records
from pipelinerl.analysis.select import Order, Wanted, choose, samples_of_step
from pipelinerl.config.compose import DEFAULT_CONFIG
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError, PipelineRLError, UserError
from pipelinerl.records import EvaluationResult
from pipelinerl.streams.base import ACTOR, EVALUATION_TOPIC
from pipelinerl.streams.open_run import find_run, open_streams
from pipelinerl.streams.read import read_all
from pipelinerl.tracking.health import Finding, newest_findings
from pipelinerl.tracking.state import REWARD, SUCCESS
from pipelinerl.tracking.token_text import token_text

Rows = list[dict[str, Any]]
_ERROR = "error: "
_LAST_LINES = 100
_REDRAW_S = 5.0
_WIDTH, _HEIGHT = 420, 90


def train(
    config_name: str = DEFAULT_CONFIG, *overrides: str, output_dir: str | Path, config_dir: str | Path | None = None
) -> Run:
    """Train as `pipelinerl launch` does, and return the run when it is complete.

    Args:
        config_name: an experiment, or your own configuration in `config_dir`.
        overrides: as on the command line: `"finetune.learning_rate=1e-5"`, `"world=single_gpu"`.
        output_dir: the folder that the run writes to. The same call resumes an interrupted run.
        config_dir: a folder with your configurations and the code of your task.

    Raises:
        UserError: something has to be changed; nothing was started.
        PipelineRLError: the run failed, with the reason.
        KeyboardInterrupt: you interrupted it; it has stopped and can be resumed.
    """
    folder = str(output_dir).replace("'", r"\'")
    words = ["--config-name", config_name, *_option("--config-dir", config_dir), f"output_dir='{folder}'", *overrides]
    _follow("launch", words, Path(output_dir))
    return Run(output_dir)


def evaluate(
    model: str | Path | Run,
    *overrides: str,
    tasks: str | Sequence[str] = (),
    k: int | None = None,
    output_dir: str | Path | None = None,
    config_name: str | None = None,
    config_dir: str | Path | None = None,
) -> Run:
    """Evaluate as `pipelinerl eval` does, and return the run that did it: see its `evaluations()` and `samples()`.

    Args:
        model: a run, its output_dir, a model folder, or a name on the hub.
        overrides: as on the command line.
        tasks: held-out sets to evaluate instead of the configured ones.
        k: samples per problem.
        output_dir: the folder to write (default: `results/NAME-evaluation`).
        config_name: task and sampling for a model, or instead of the run's.
        config_dir: a folder with your configurations and the code of your task.

    Raises:
        UserError: something has to be changed; nothing was started.
        PipelineRLError: the evaluation failed, with the reason.
    """
    name = str(model.path if isinstance(model, Run) else model)
    output = Path(output_dir) if output_dir is not None else default_output(name)
    words = [
        name,
        "--output",
        str(output),
        *_option("--tasks", tasks if isinstance(tasks, str) else ",".join(tasks) or None),
        *_option("--samples", k),
    ]
    words += [*_option("--config-name", config_name), *_option("--config-dir", config_dir), *overrides]
    _follow("eval", words, output)
    return Run(output)


class Run:
    """Reads a run directory.

    Args:
        path: the output_dir of a run.

    Attributes:
        path: the same, absolute.

    Raises:
        ConfigError: it is not the directory of a started run.
    """

    def __init__(self, path: str | Path) -> None:
        self._run = find_run(Path(path).expanduser())
        self._files = self._run.run_dir
        self.path = self._files.root

    @property
    def is_running(self) -> bool:
        """Whether its launcher is alive."""
        return self._run.is_running

    @property
    def summary(self) -> dict[str, Any] | None:
        """`summary.json`: status, steps, success before and after; None before the run has ended once."""
        if not self._files.summary_file.exists():
            return None
        return msgspec.json.decode(self._files.summary_file.read_bytes(), type=dict[str, Any])

    @property
    def findings(self) -> list[Finding]:
        """What looks wrong in its numbers, with evidence and advice; the newest finding of each name."""
        return newest_findings(self._files.findings_file)

    @property
    def model(self) -> Path | None:
        """Folder of its best model, else its newest one, for `from_pretrained`; None if there is none yet."""
        folders = (self._files.best_model, self._files.current_model)
        return next((folder for folder in folders if (folder / "config.json").is_file()), None)

    def metrics(self) -> Any:
        """One row per step (policy version), one column per metric; the newest value counts."""
        return _table(self._steps())

    def evaluations(self) -> Any:
        """One row per evaluation of a held-out set, in order."""
        with open_streams(self._run) as streams:
            found = list(read_all(streams, EVALUATION_TOPIC, ACTOR, EvaluationResult))
        return _table([msgspec.to_builtins(each) for each in found])

    def samples(
        self,
        count: int | None = 100,
        order: Order = "last",
        *,
        evaluation: bool = False,
        dataset: str | None = None,
        version: int | None = None,
        step: int | None = None,
    ) -> Any:
        """One row per sample of the chosen rollouts, with the fields of `pipelinerl samples --json`.

        Args:
            count: maximal number of rollouts; None: all.
            order: the `last` or `first` rollouts, or the `best` or `worst` by reward.
            evaluation: rollouts of evaluations instead of training.
            dataset: only rollouts of this data set.
            version: only rollouts with tokens of this policy version.
            step: only rollouts in the batch of this optimizer step.

        Raises:
            StreamError: a record is damaged.
            ConfigError: the run has not reached `step`.
        """
        if step is not None and evaluation:
            raise ConfigError("step", step, "None with evaluation=True: no step trains on evaluations", "Omit it.")
        with open_streams(self._run) as streams:
            ids = None if step is None else samples_of_step(streams, step)
            made = evaluations_of(self._run, streams, evaluation)
            wanted = Wanted(order, count, dataset, version, sample_ids=ids, evaluations=made)
            chosen, _ = choose(streams, wanted)
            decoder, _ = token_text(self._run.config, self._run.run_dir)
            records = read_records(streams, wanted, chosen, decoder, max_chars=0)
            return _table([row for record in records for row in rows(record)])

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        summary = {name: value for name, value in (self.summary or {}).items() if name in _SHOWN and value is not None}
        state = {"status": "running"} if self.is_running else summary
        lines = [f"<b>{escape(str(self.path))}</b>", *(f"{name}: {_short(value)}" for name, value in state.items())]
        lines += [escape(finding.line) for finding in self.findings]
        return "<br>".join([*lines, _curves(self._steps())])

    def _steps(self) -> Rows:
        steps: dict[int, dict[str, Any]] = {}
        content = self._files.metrics_file.read_bytes() if self._files.metrics_file.exists() else b""
        whole, _, _ = content.rpartition(b"\n")  # the last line may be incomplete
        for line in whole.splitlines():
            record = msgspec.json.decode(line, type=dict[str, Any])
            del record["source"]
            steps.setdefault(record["step"], {}).update(record)
        return [steps[step] for step in sorted(steps)]


_SHOWN = ("status", "reason", "steps", "success_before", "success_after", "seconds")


def _follow(command: str, words: Sequence[str], run_dir: Path) -> None:
    """Run a command to its end and print its output, in a notebook with the curves below."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    chart = _Chart(run_dir) if "ipykernel" in sys.modules else None
    # In its own process group: an interrupt reaches only this process, which passes it on.
    with subprocess.Popen(
        [sys.executable, "-m", "pipelinerl", command, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
        process_group=0,
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                last.append(line)
                if chart is not None:
                    chart.draw()
        except BaseException:
            child.send_signal(signal.SIGINT)
            sys.stdout.write(child.stdout.read())
            raise
    if chart is not None:
        chart.draw(is_last=True)
    if child.returncode:
        error = UserError if child.returncode == EXIT_USER_ERROR else PipelineRLError
        raise error(_reason(list(last)) or f"{command} ended with exit code {child.returncode} and no output")


def _reason(lines: list[str]) -> str:
    """The last error that the command printed, else its last line."""
    starts = [place for place, line in enumerate(lines) if line.startswith(_ERROR)]
    return "".join(lines[starts[-1] if starts else -1 :]).removeprefix(_ERROR).strip()


class _Chart:
    """The curves of an active run in a notebook."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._handle: Any = None
        self._drawn_at = time.monotonic()

    def draw(self, is_last: bool = False) -> None:
        if time.monotonic() < self._drawn_at + _REDRAW_S and not is_last:
            return
        self._drawn_at = time.monotonic()
        # There is no run directory at first, and a picture must not end the run.
        with suppress(Exception):
            run = Run(self._run_dir)
            if self._handle is None:
                self._handle = import_module("IPython.display").display(run, display_id=True)
            else:
                self._handle.update(run)


def _option(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _table(table: Rows) -> Any:
    if importlib.util.find_spec("pandas") is None:
        return table
    return import_module("pandas").DataFrame(table)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def _curves(steps: Sequence[Mapping[str, Any]]) -> str:
    """Reward and success of training as a small SVG; empty before the second step."""
    lines = []
    for names, label, color in ((REWARD, "reward", "steelblue"), (SUCCESS, "success", "seagreen")):
        name = next((name for name in names if any(name in step for step in steps)), names[0])
        points = [(step["step"], step[name]) for step in steps if name in step]
        if len(points) < 2:
            continue
        (first, _), (last, newest) = points[0], points[-1]
        low, high = min(value for _, value in points), max(value for _, value in points)
        places = " ".join(
            f"{_WIDTH * (step - first) / (last - first):.1f},{_HEIGHT * (high - value) / ((high - low) or 1):.1f}"
            for step, value in points
        )
        lines.append(
            f'<div style="color:{color}">{label} {low:.3g} to {high:.3g}, now {newest:.3g}<br>'
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" overflow="visible"><polyline points="{places}" fill="none" '
            'stroke="currentColor" stroke-width="1.5"/></svg></div>'
        )
    return "".join(lines)
