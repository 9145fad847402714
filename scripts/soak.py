"""The loop of `scripts/soak.sh`: start, kill -9 of a random process at a random moment, resume, and audit at the end.

Waits for the launcher's end and looks at heartbeats meanwhile; every wait has a deadline, and a missed one ends the
soak with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from pipelinerl.supervise.heartbeat import read_heartbeat
from pipelinerl.supervise.run_dir import RunDir

END_S = 60.0
GONE_S = 15.0
FIRST_STEP_S = 900.0
FINISH_S = 3600.0
LOOK_S = 0.5
# Every third kill comes while the processes start, the others while they work.
START_SHARE = 1 / 3
EXTRA_STEPS = 10


class SoakError(Exception):
    """Something that must hold did not; the message says what."""


class Soak:
    """One output_dir and the runs in it."""

    def __init__(self, output_dir: Path, overrides: list[str], seed: int) -> None:
        self.files = RunDir(output_dir.absolute())
        self.overrides = overrides
        self.rng = random.Random(seed)
        self.steps = 40
        self.killed: Counter[str] = Counter()

    def start(self) -> subprocess.Popen[bytes]:
        self.files.root.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "pipelinerl.launch", "--config-name", "quickstart"),
            *(f"output_dir={self.files.root}", "finetune.save_checkpoint_steps=2", "finetune.keep_last_checkpoints=3"),
            *("finetune.keep_intermediate_checkpoints=false", f"finetune.max_train_steps={self.steps}"),
            *self.overrides,
        ]
        with (self.files.root / "soak.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill_one(self, number: int) -> None:
        """One start and one kill."""
        launcher = self.start()
        started = time.monotonic()
        if self.rng.random() < START_SHARE:
            when = f"{self._wait(launcher, self.rng.uniform(1, 25)):.1f} s after the start"
        else:
            steps = self._wait_for_step(launcher)
            self._wait(launcher, self.rng.uniform(0, 15))
            when = f"after step {steps} of this start"
        if launcher.poll() is not None:
            self._expect_complete(launcher)
            return
        victim = self.rng.choice(self._processes(launcher))
        name = _job_name(victim)
        killed_at = time.monotonic()
        victim.kill()
        try:
            code = launcher.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise SoakError(f"the launcher did not end within {END_S:.0f} s after the kill of {name}") from error
        self._expect_gone()
        if code == 0 and victim.pid != launcher.pid:
            print(f"kill {number}: {name} {when}: training was complete", flush=True)
            self.steps += EXTRA_STEPS
            return
        self.killed[name] += 1
        seconds = time.monotonic() - killed_at
        total = time.monotonic() - started
        print(f"kill {number}: {name} {when}; all gone {seconds:.1f} s later, {total:.0f} s in all", flush=True)

    def finish(self) -> dict[str, object]:
        """Run to the end, audit, and return the summary."""
        launcher = self.start()
        try:
            code = launcher.wait(FINISH_S)
        except subprocess.TimeoutExpired as error:
            raise SoakError(f"training did not end within {FINISH_S:.0f} s") from error
        if code != 0:
            raise SoakError(f"the last start ended with exit code {code}; see {self.files.root / 'soak.log'}")
        self._expect_gone()
        audit = subprocess.run([sys.executable, "-m", "pipelinerl", "audit", str(self.files.root)], check=False)
        if audit.returncode != 0:
            raise SoakError("the audit is not clean")
        summary: dict[str, object] = json.loads(self.files.summary_file.read_text(encoding="utf-8"))
        return summary

    def _wait(self, launcher: subprocess.Popen[bytes], seconds: float) -> float:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(seconds)
        return seconds

    def _wait_for_step(self, launcher: subprocess.Popen[bytes]) -> int:
        """Block until the trainer of this start has taken a step; returns how many it has taken."""
        since, deadline = time.time(), time.monotonic() + FIRST_STEP_S
        while launcher.poll() is None:
            beat = read_heartbeat(self.files.heartbeat_file("finetune_0"))
            if beat is not None and beat.time > since and beat.progress > 0 and psutil.pid_exists(beat.pid):
                return beat.progress
            if time.monotonic() > deadline:
                raise SoakError(f"no step within {FIRST_STEP_S:.0f} s after a start")
            self._wait(launcher, LOOK_S)
        return 0

    def _processes(self, launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """The launcher and everything below it, in an order that does not depend on process ids."""
        parent = psutil.Process(launcher.pid)
        return [parent, *sorted(parent.children(recursive=True), key=lambda p: (_job_name(p), p.create_time()))]

    def _expect_complete(self, launcher: subprocess.Popen[bytes]) -> None:
        if launcher.returncode != 0:
            raise SoakError(
                f"a start ended by itself with exit code {launcher.returncode}; see {self.files.root / 'soak.log'}"
            )
        print(f"training was complete at step {self.steps}: {EXTRA_STEPS} more", flush=True)
        self.steps += EXTRA_STEPS

    def _expect_gone(self) -> None:
        deadline = time.monotonic() + GONE_S
        while left := self._living():
            if time.monotonic() > deadline:
                raise SoakError(f"processes that outlived the run: {left}")
            psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], timeout=LOOK_S)

    def _living(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if (
                "--run-dir" in words
                and str(self.files.root) in words
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
        return found


def _job_name(process: psutil.Process) -> str:
    """Job of a process: what `--job` says, or the launcher, or a helper of a job."""
    try:
        words = process.cmdline()
        if "--job" in words:
            return words[words.index("--job") + 1]
        if "pipelinerl.launch" in words:
            return "launcher"
        return f"helper of {process.environ().get('PIPELINERL_JOB', 'the launcher')}"
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return "a process that ended"


def main() -> int:
    """Run the soak; 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="overrides of conf/quickstart.yaml")
    args = parser.parse_args()
    if args.output_dir.exists():
        print(f"{args.output_dir} exists: choose another folder, or remove it", file=sys.stderr)
        return 2
    soak, started = Soak(args.output_dir, args.overrides, args.seed), time.monotonic()
    try:
        number = 0
        while soak.killed.total() < args.kills:
            number += 1
            soak.kill_one(number)
        summary = soak.finish()
    except SoakError as error:
        print(f"soak FAILED: {error}", file=sys.stderr)
        return 1
    victims = ", ".join(f"{name} {count}" for name, count in soak.killed.most_common())
    print(
        f"soak passed: {soak.killed.total()} kills ({victims}) in {time.monotonic() - started:.0f} s, seed {args.seed}"
    )
    print(f"steps {summary['steps']}, success {summary['success_before']} -> {summary['success_after']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
