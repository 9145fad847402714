"""Our figures of GPUs again, as many as fit into a given time: named measurements, side by side on disjoint cards.

    python scripts/gpu_measurements.py --list                                      # the plan for the GPUs that are here
    python scripts/gpu_measurements.py --model FOLDER --limit-s 1500 --output results/gpu
    python scripts/gpu_measurements.py --model FOLDER --only levers tests --skip test-idle-rank --output results/gpu
    python scripts/gpu_measurements.py --device cpu --gpus 2 --only levers --output results/rehearsal   # tiny models

They start in the list's order (or that of `--only`) as soon as there are cards for them, each with
`CUDA_VISIBLE_DEVICES` of its own; tests, which give no times, share cards with other tests. None starts that is not
expected to end within `--limit-s`. One that is past its own limit gets SIGTERM, and SIGKILL after a grace, with all
processes that it started. Runs that learn end when their goal is reached. `summary.json`, `summary.md` and what is kept
of a measurement (a megabyte at most) are in `--output` as soon as it is over, so whatever stops this, the rest stays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_measurements_list import measurements
from gpu_measurements_machine import cards_here, describe, versions
from gpu_measurements_plan import Measurement, Running, chosen, plan, starts
from gpu_measurements_process import GRACE_S, Job, reap_orphans, wait_any
from gpu_measurements_results import Record, Summary, collect, status_of

from pipelinerl.run.descendants import become_subreaper

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def command_of(measurement: Measurement, model: str, work: Path) -> list[str]:
    """Its words, with this Python, the model and its folder filled in."""
    filled = {"{python}": sys.executable, "{model}": model, "{work}": str(work)}
    words = []
    for word in measurement.command:
        for key, value in filled.items():
            word = word.replace(key, value)
        words.append(word)
    return words


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """No second interrupt: what runs is being ended already, and takes `GRACE_S` at most."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """Runs a list of measurements; `measure` blocks until all that fit are over."""

    def __init__(
        self, summary: Summary, cards: Sequence[str], model: str, scratch: Path, grace_s: float = GRACE_S
    ) -> None:
        self._summary = summary
        self._cards = list(cards)
        self._model = model
        self._scratch = scratch
        self._grace_s = grace_s
        self._jobs: list[Job] = []
        self._begin_s = time.monotonic()
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self._environ: Mapping[str, str] = {**os.environ, "PYTHONPATH": paths}

    def measure(self, waiting: Sequence[Measurement], limit_s: float) -> None:
        """Start and end what is due until nothing runs and nothing more fits. Whatever goes wrong ends what runs."""
        waiting, end_s = list(waiting), limit_s - self._grace_s
        self._summary.write()
        try:
            while True:
                running = [Running(job.measurement, job.cards, job.start_s) for job in self._jobs]
                for measurement, cards in starts(waiting, running, self._cards, self._now_s(), end_s):
                    waiting.remove(measurement)
                    self._start(measurement, cards, end_s)
                if not self._jobs:
                    break
                for job in self._turn():
                    self._finish(job)
        except BaseException:  # a full disk, too: nobody else would end what holds the cards
            self._end_all()
            raise
        finally:
            for measurement in waiting:
                self._summary.records[measurement.name].status = "not started"
            self._summary.write()

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _start(self, measurement: Measurement, cards: tuple[str, ...], end_s: float) -> None:
        work = self._scratch / measurement.name
        command = command_of(measurement, self._model, work)
        job = Job(measurement, cards, command, work, REPOSITORY, self._environ, self._now_s(), end_s, self._grace_s)
        self._jobs.append(job)
        record = self._summary.records[measurement.name]
        record.status, record.cards, record.start_s = "running", list(cards), job.start_s
        record.command = shlex.join(command)
        self._summary.write()
        self._say(f"{measurement.name} starts on {','.join(cards)}, expected {measurement.expected_s:.0f} s")

    def _end_all(self) -> None:
        with deaf():
            for job in self._jobs:
                job.end("interrupted", self._now_s())
            while self._jobs:
                for job in self._turn():
                    with contextlib.suppress(OSError):  # what cannot be kept
                        self._finish(job)

    def _turn(self) -> list[Job]:
        """Wait until something is due or ends, and do what is due; those that are over and run no more."""
        pids = [job.pids() for job in self._jobs]
        if all(pids):
            due_s = min(job.next_s for job in self._jobs)
            wait_any([pid for those in pids for pid in those], due_s - self._now_s())
        for job in self._jobs:
            job.advance(self._now_s())
        over = [job for job in self._jobs if job.over]
        self._jobs = [job for job in self._jobs if not job.over]
        reap_orphans(self._jobs)
        return over

    def _finish(self, job: Job) -> None:
        record = self._summary.records[job.measurement.name]
        record.seconds, record.exit_code = self._now_s() - job.start_s, job.exit_code
        record.status = status_of(job.exit_code, job.why)
        collect(record, job.measurement.kind, job.work, self._summary.output)
        shutil.rmtree(job.work, ignore_errors=True)
        self._summary.write()
        self._say(f"{record.name}: {record.status} after {record.seconds:.0f} s  {record.figures}")

    def _say(self, line: str) -> None:
        print(f"{self._now_s():6.0f} s  {line}", flush=True)


def listing(measured: Sequence[Measurement], cards: Sequence[str], limit_s: float) -> str:
    """The plan by expected times, as text."""
    planned = plan(measured, cards, limit_s - GRACE_S)
    lines = [f"{len(cards)} GPUs, {limit_s:g} s: starts and ends by expected times", ""]
    lines += [f"{'start':>6} {'end':>6} {'limit':>6}  {'cards':<8} {'name':<24} what"]
    for job in planned:
        known = job.measurement
        times = f"{job.start_s:>6.0f} {job.start_s + known.expected_s:>6.0f} {known.limit_s:>6.0f}"
        lines.append(f"{times}  {','.join(job.cards):<8} {known.name:<24} {known.what}")
    for left in [known for known in measured if known not in [job.measurement for job in planned]]:
        why = f"{left.gpus} GPUs" if left.gpus > len(cards) else "no time"
        lines.append(f"{'-':>6} {left.expected_s:>5.0f}s {left.limit_s:>6.0f}  {why:<8} {left.name:<24} {left.what}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names or groups, in the order to start them")
    parser.add_argument("--skip", nargs="*", default=[], help="names or groups")
    parser.add_argument("--limit-s", type=float, default=3600, help="for all together")
    parser.add_argument("--gpus", type=int, help="the first so many of the GPUs that are here; default: all")
    parser.add_argument("--model", help=f"a folder or name; default: {DEFAULT_MODEL}")
    parser.add_argument("--output", type=Path, default=Path("results/gpu_measurements"))
    parser.add_argument(
        "--scratch", type=Path, help="where runs have their folders meanwhile; default: a temporary one"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal of the commands")
    parser.add_argument("--list", action="store_true", help="print the plan with expected times, and start nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and start nothing")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    shown = args.list or args.dry_run
    cards = cards_here(args.gpus, pretend=shown or args.device == "cpu")
    about = describe(cards) if args.device == "cuda" else []
    small = any(card["memory_gib"] < 100 for card in about)
    try:
        measured = chosen(measurements(args.device, small, len(cards)), args.only, args.skip)
    except ValueError as error:
        sys.exit(f"--only, --skip: {error}")
    if args.list:
        print(listing(measured, cards, args.limit_s))
    if args.dry_run:
        for job in plan(measured, cards, args.limit_s - GRACE_S):
            words = command_of(
                job.measurement, args.model or DEFAULT_MODEL, args.output / "work" / job.measurement.name
            )
            print(f"# {job.measurement.name}\nCUDA_VISIBLE_DEVICES={','.join(job.cards)} {shlex.join(words)}")
    if shown:
        return
    try:
        run(args, measured, cards, {"cards": about, "versions": versions(), "limit_s": args.limit_s})
    except OSError as error:  # a folder that cannot be written, a full disk
        sys.exit(f"--output, --scratch: {error}")


def run(args: argparse.Namespace, measured: Sequence[Measurement], cards: list[str], about: dict[str, Any]) -> None:
    """Measure; exits with 1 if one of them went wrong or was not started."""
    known = ("name", "group", "what", "gpus", "expected_s", "limit_s")
    records = [Record(**{name: getattr(measurement, name) for name in known}) for measurement in measured]
    summary = Summary(args.output.absolute(), {"started": time.strftime("%Y-%m-%d %H:%M:%S"), **about}, records)
    become_subreaper()
    # As Ctrl-C: what runs is ended, and what is done stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    summary.write()
    if args.scratch is not None:
        args.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-measurements-", dir=args.scratch, ignore_cleanup_errors=True) as name:
        model = args.model or (tiny_model(Path(name)) if args.device == "cpu" else DEFAULT_MODEL)
        try:
            Session(summary, cards, model, Path(name)).measure(measured, args.limit_s)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            print((summary.output / "summary.md").read_text())
    sys.exit(any(record.status not in ("ok", "reached") for record in records))


def tiny_model(folder: Path) -> str:
    """A random one, for rehearsals."""
    from pipelinerl.tiny.build import build_tiny_model

    return str(build_tiny_model(folder / "tiny-model", seed=3, warmup=None, progress=lambda line: None))


if __name__ == "__main__":
    main()
