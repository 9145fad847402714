"""What is left of measurements: small files, figures, and a summary that is written anew after each of them.

    OUTPUT/summary.json, summary.md        all that were chosen, with status and figures
    OUTPUT/NAME/stdout.txt, stderr.txt     the end of what it said
    OUTPUT/NAME/curve.csv                  of a run that learns: success, entropy, rate, lag ... by steps and seconds
    OUTPUT/NAME/...                        metrics and results of its runs, compressed where that helps

A measurement keeps `KEPT_BYTES` at most, so that the whole stays small enough to be carried about.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark_splits_figures import cell, rows_of
from gpu_measurements_figures import CURVE, curve_of, figures_of

KEPT_BYTES = 800_000
#: The end of what a process said.
_LOG_BYTES = 30_000
_SAID_BYTES = 60_000
_COMPRESSED_FROM_BYTES = 8_000
_RUN_FILES = (
    "summary.json",
    "conf/exp_config.yaml",
    "metrics.jsonl",
    "learning_curve.png",
    "launch.log",
    "*/stderr.log",
)
#: What is kept of a measurement's folder, by its kind, in the order of what matters most.
KEPT = {
    "run": tuple(f"run/{name}" for name in _RUN_FILES),
    "schedules": ("result.json", *(f"runs/*/run/{name}" for name in _RUN_FILES), "runs/*/launch.txt"),
    "server": ("result.json",),
    "splits": ("result.json", *(f"runs/*/run/{name}" for name in _RUN_FILES), "runs/*/launch.txt"),
    "tests": (
        "tests.xml",
        *(f"pytest/*/run/{name}" for name in _RUN_FILES),
        *("pytest/*/log_*.txt", "pytest/*/result_*.json", "pytest/*/server.log"),
    ),
}


@dataclass
class Record:
    """A measurement's line in the summary. Times are seconds since the first one began."""

    name: str
    group: str
    what: str
    gpus: int
    expected_s: float
    limit_s: float
    status: str = "waiting"
    cards: list[str] = field(default_factory=list)
    start_s: float | None = None
    seconds: float | None = None
    exit_code: int | None = None
    command: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Summary:
    """The files of a whole session below `output`; both are replaced at every `write`, never half-written."""

    def __init__(self, output: Path, about: Mapping[str, Any], records: Sequence[Record]) -> None:
        self.output = output
        self._about = dict(about)
        self.records = {record.name: record for record in records}

    def write(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        lines = [asdict(record) for record in self.records.values()]
        _replace(self.output / "summary.json", json.dumps({**self._about, "measurements": lines}, indent=1) + "\n")
        _replace(self.output / "summary.md", markdown(list(self.records.values())) + "\n")


def status_of(exit_code: int | None, why: str | None) -> str:
    """`ok` and `reached` are the good ones."""
    return why or ("ok" if exit_code == 0 else "failed")


def collect(record: Record, kind: str, work: Path, output: Path) -> None:
    """Take over from a measurement's folder what is worth keeping, and its figures.

    A folder in any state will do: a run may have been ended at any moment.
    """
    target = output / record.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("stdout.txt", "stderr.txt"):
        (target / name).write_bytes(_end_of(work / name, _SAID_BYTES))
    curve = []
    try:
        record.figures = figures_of(kind, work)
        curve = curve_of(rows_of(work / "run")) if kind == "run" else []
    except Exception as error:  # noqa: BLE001 - what was measured is kept, whatever its figures look like
        record.figures = {"error": f"no figures: {type(error).__name__}: {error}"}
    if curve:
        with (target / "curve.csv").open("w", newline="") as rows:
            table = csv.DictWriter(rows, ["step", "seconds", *CURVE])
            table.writeheader()
            table.writerows(curve)
    left = KEPT_BYTES
    for file in _files(work, KEPT[kind]):
        name, data = file.relative_to(work).as_posix(), _content(file)
        if len(data) > _COMPRESSED_FROM_BYTES and file.suffix != ".png":
            name, data = f"{name}.gz", gzip.compress(data, 9, mtime=0)
        if len(data) > left:
            record.left_out.append(name)
            continue
        left -= len(data)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
        record.files.append(name)


def markdown(records: Sequence[Record]) -> str:
    """One line for each measurement, with the figures that it has."""
    lines = ["| measurement | status | cards | s | figures |", "|---|---|---|---|---|"]
    for record in records:
        figures = ", ".join(f"{name} {cell(value)}" for name, value in record.figures.items() if value is not None)
        seconds = "-" if record.seconds is None else f"{record.seconds:.0f}"
        status = record.status + (f" ({record.exit_code})" if record.exit_code and record.status == "failed" else "")
        lines.append(f"| {record.name} | {status} | {','.join(record.cards) or '-'} | {seconds} | {figures or '-'} |")
    return "\n".join(lines)


def _files(work: Path, patterns: Sequence[str]) -> list[Path]:
    """In the order of the patterns, each once. Links are not followed: pytest makes some to its newest folders."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        for file in sorted(work.glob(pattern)):
            if file.is_file() and not any(part.is_symlink() for part in (file, *file.parents) if part != work):
                found[file] = None
    return list(found)


def _content(file: Path) -> bytes:
    is_log = file.suffix in (".log", ".txt")
    return _end_of(file, _LOG_BYTES) if is_log else file.read_bytes()


def _end_of(file: Path, limit: int) -> bytes:
    try:
        with file.open("rb") as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(0, size - limit))
            return content.read()
    except FileNotFoundError:
        return b""


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    draft.replace(path)
