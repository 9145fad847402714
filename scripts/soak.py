"""The loop of `scripts/soak.sh`: start, kill -9 of a random process at a random moment, resume, and audit at the end.

Waits for the launcher's end and looks at `metrics.jsonl` meanwhile; every wait has a deadline, and a missed one ends
the soak with exit code 1. A killed server may be started again in place: then training has to continue, in the same
start. When `--limit-s` is over no more kills follow: the run is completed and judged, and exit code 3 says that there
were fewer kills than asked for.

With `--nodes` the run is over so many launchers on loopback addresses, and Ray's processes are among the victims.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from pipelinerl.rundir.layout import RunDir

END_S = 60.0
GONE_S = 15.0
FIRST_STEP_S = 900.0
FINISH_S = 3600.0
LOOK_S = 0.5
# Training continues for this many steps at most with what is already in the streams.
STEPS_AFTER_KILL = 5
# Every third kill comes while the processes start, the others while they work.
START_SHARE = 1 / 3
EXTRA_STEPS = 10
#: In the environment of every process of a soak: its folder.
MARK = "PIPELINERL_SOAK"
#: How long several nodes wait for one that was killed before it joined, and what their ends may take, in seconds.
NODES_S, NODES_END_S = 60.0, 150.0
# The end of one of these ends the run at once; after that of others training may also continue.
MUST_END = ("launcher", "actor_0", "preprocessor_0", "finetune_0")


class SoakError(Exception):
    """Something that must hold did not; the message says what."""


class Soak:
    """One output_dir and the runs in it."""

    def __init__(self, output_dir: Path, overrides: list[str], seed: int, steps: int, num_nodes: int = 1) -> None:
        self.files = RunDir(output_dir.absolute())
        self.overrides = overrides
        self.rng = random.Random(seed)
        self.steps = steps
        self.num_nodes = num_nodes
        self.end_s = END_S if num_nodes == 1 else NODES_END_S
        self.killed: Counter[str] = Counter()
        self.longest_end_s = 0.0
        self.longest_return_s = 0.0
        self._launcher: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []  # of the nodes above 0
        self._started_at = 0.0

    def start(self) -> subprocess.Popen[bytes]:
        self.files.root.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "pipelinerl.launch", "--config-name", "quickstart"),
            *(f"output_dir={self.files.root}", "finetune.save_checkpoint_steps=2", "finetune.keep_last_checkpoints=3"),
            *("finetune.keep_intermediate_checkpoints=false", f"finetune.max_train_steps={self.steps}"),
            *("supervise.max_server_restarts=1000", f"supervise.nodes_timeout_s={NODES_S}"),
            *self.overrides,
        ]
        environ, token = {**os.environ, MARK: str(self.files.root)}, secrets.token_hex(16)
        launchers = []
        with (self.files.root / "soak.log").open("ab") as log:
            for rank in range(self.num_nodes):
                if self.num_nodes > 1:
                    environ |= {"WORLD_SIZE": str(self.num_nodes), "RANK": str(rank), "MASTER_ADDR": "127.0.0.2"}
                    # Ray takes 127.0.0.1 for a name of the machine's own address.
                    environ |= {"PIPELINERL_NODE_ADDRESS": f"127.0.0.{rank + 2}", "RAY_AUTH_TOKEN": token}
                launchers.append(
                    subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)
                )
        self._others = launchers[1:]
        return launchers[0]

    def kill_one(self, number: int) -> None:
        """One kill, in the present start or a new one."""
        started = time.monotonic()
        if self._launcher is None:
            launcher = self._launcher = self.start()
            self._started_at = time.time()
            is_early = self.rng.random() < START_SHARE
        else:
            launcher, is_early = self._launcher, False
        if is_early:
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
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return
        went_on = name not in MUST_END and self._wait_for_return(launcher)
        code = None if went_on else self._wait_for_end(launcher, name)
        if code == 0 and victim.pid != launcher.pid:
            print(f"kill {number}: {name} {when}: training was complete", flush=True)
            self.steps += EXTRA_STEPS
            return
        self.killed[name] += 1
        seconds, total = time.monotonic() - killed_at, time.monotonic() - started
        if went_on:
            self.longest_return_s = max(self.longest_return_s, seconds)
            what = f"training went on, {STEPS_AFTER_KILL} steps in {seconds:.1f} s"
        else:
            self.longest_end_s = max(self.longest_end_s, seconds)
            what = f"all gone {seconds:.1f} s later"
        print(f"kill {number}: {name} {when}; {what}, {total:.0f} s in all", flush=True)

    def _wait_for_end(self, launcher: subprocess.Popen[bytes], name: str) -> int:
        deadline = time.monotonic() + self.end_s
        try:
            code, *_ = [each.wait(max(0.0, deadline - time.monotonic())) for each in (launcher, *self._others)]
        except subprocess.TimeoutExpired as error:
            raise SoakError(f"a launcher did not end within {self.end_s:.0f} s after the kill of {name}") from error
        self._launcher = None
        self._expect_gone()
        return code

    def _wait_for_return(self, launcher: subprocess.Popen[bytes]) -> bool:
        """Whether training continued after the kill of a helper or a server; False: the launcher ended instead."""
        since, deadline = time.time(), time.monotonic() + FIRST_STEP_S
        while launcher.poll() is None:
            if self._steps_since(since) >= STEPS_AFTER_KILL:
                return True
            if time.monotonic() > deadline:
                raise SoakError(f"training did not continue within {FIRST_STEP_S:.0f} s after a kill")
            self._wait(launcher, LOOK_S)
        return False

    def _steps_since(self, since: float) -> int:
        """Steps that the trainer took after the time `since`."""
        try:
            lines = self.files.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return 0
        rows = [json.loads(line) for line in lines if '"source":"finetune_0"' in line]
        return len({row["step"] for row in rows if row["time"] > since})

    def finish(self) -> dict[str, object]:
        """Run to the end, audit, and return the summary."""
        launcher = self._launcher or self.start()
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

    def stop(self) -> None:
        """End what is running, after a failure."""
        for launcher in (self._launcher, *self._others):
            if launcher is not None:
                launcher.terminate()
                try:
                    launcher.wait(END_S)
                except subprocess.TimeoutExpired:
                    launcher.kill()

    def _wait(self, launcher: subprocess.Popen[bytes], seconds: float) -> float:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(seconds)
        return seconds

    def _wait_for_step(self, launcher: subprocess.Popen[bytes]) -> int:
        """Block until the trainer of this start has taken a step; returns how many it has taken."""
        deadline = time.monotonic() + FIRST_STEP_S
        while launcher.poll() is None:
            if steps := self._steps_since(self._started_at):
                return steps
            if time.monotonic() > deadline:
                raise SoakError(f"no step within {FIRST_STEP_S:.0f} s after a start")
            self._wait(launcher, LOOK_S)
        return 0

    def _processes(self, launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """The launchers and everything below them, in an order that does not depend on process ids."""
        parents = [psutil.Process(each.pid) for each in (launcher, *self._others) if each.poll() is None]
        below = [process for parent in parents for process in parent.children(recursive=True)]
        return [*parents, *sorted(below, key=lambda p: (_job_name(p), p.create_time()))]

    def _expect_complete(self, launcher: subprocess.Popen[bytes]) -> None:
        if launcher.returncode != 0:
            raise SoakError(
                f"a start ended by itself with exit code {launcher.returncode}; see {self.files.root / 'soak.log'}"
            )
        self._launcher = None
        self._expect_gone()
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
        for process in psutil.process_iter(["environ", "status"]):
            is_ours = (process.info["environ"] or {}).get(MARK) == str(self.files.root)
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
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
        if words and ("redis" in words[0] or "valkey" in words[0]):
            return "Redis server"
        if ray := next((word for word in words if "/ray/" in word or word.startswith(("ray::", "ray.scripts"))), None):
            return f"Ray's {ray.rpartition('/')[2]}"
        return f"helper of {process.environ().get('PIPELINERL_JOB', 'the launcher')}"
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return "a process that ended"


def main() -> int:
    """Run the soak; 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=52, help="optimizer steps; more if kills come after the last")
    parser.add_argument("--limit-s", type=float, default=6 * 3600.0, help="no kill after this long")
    parser.add_argument("--min-success", type=float, default=0.8, help="held-out success that the end has to reach")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="overrides of conf/quickstart.yaml")
    parser.add_argument("--nodes", type=int, default=1, help="launchers, on loopback addresses as on several nodes")
    args = parser.parse_args()
    if args.output_dir.exists():
        print(f"{args.output_dir} exists: choose another folder, or remove it", file=sys.stderr)
        return 2
    soak, started = Soak(args.output_dir, args.overrides, args.seed, args.steps, args.nodes), time.monotonic()
    try:
        number = 0
        while soak.killed.total() < args.kills and time.monotonic() - started < args.limit_s:
            number += 1
            soak.kill_one(number)
        kills_s = time.monotonic() - started
        print(f"{soak.killed.total()} kills in {kills_s:.0f} s; now to the end of training", flush=True)
        summary = soak.finish()
        _expect_learning(summary, args.min_success)
    except SoakError as error:
        print(f"soak FAILED: {error}", file=sys.stderr)
        soak.stop()
        return 1
    print_result(soak, summary, time.monotonic() - started, args)
    return 0 if soak.killed.total() >= args.kills else 3


def _expect_learning(summary: dict[str, object], least: float) -> None:
    after = summary["success_after"]
    if not isinstance(after, float) or after < least:
        raise SoakError(f"success at the end is {after}, expected at least {least}")


def print_result(soak: Soak, summary: dict[str, object], seconds: float, args: argparse.Namespace) -> None:
    """The figures of a soak that held."""
    victims = ", ".join(f"{name} {count}" for name, count in soak.killed.most_common())
    total = soak.killed.total()
    verdict = "passed" if total >= args.kills else f"stopped by its limit at {total} of {args.kills} kills; all held"
    print(f"soak {verdict}: {total} kills ({victims}) in {seconds:.0f} s, seed {args.seed}")
    print(f"longest end of a run after a kill {soak.longest_end_s:.1f} s", end="")
    print(f", longest time to {STEPS_AFTER_KILL} steps after one that a run survives {soak.longest_return_s:.1f} s")
    print(f"steps {summary['steps']}, success {summary['success_before']} -> {summary['success_after']}")


if __name__ == "__main__":
    sys.exit(main())
