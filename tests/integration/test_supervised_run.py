"""Life and death of a supervised run, with real processes (lines L3, L5, L8, L9)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelinerl.run.pool_command import PoolRequest, ask
from pipelinerl.run.start import SOCKET_FOLDER_KEY, server_sockets
from pipelinerl.rundir.layout import RunDir

# Nothing here takes long; this only bounds a test that fails.
LIMIT_S = 200.0
DRIVER = Path(__file__).parents[1] / "fakes" / "supervised_run.py"

SLEEP = "import time; time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
)
# Says that it was asked to end, and goes on.
STUBBORN_AND_SAYS_SO = STUBBORN.replace("signal.SIG_IGN", "lambda *_: print('asked', flush=True)")
RAISES = "import time; time.sleep(0.5)\nraise ValueError('bad row 7')"
# Logs an error that it survives, and more; then a signal ends it.
IS_KILLED = """
import faulthandler, logging, os, signal
faulthandler.enable()
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
try:
    raise ValueError("it went on")
except ValueError:
    logging.exception("a group failed")
for step in range(9):
    logging.info("step %d", step)
signal.raise_signal(signal.SIGNAL)
"""
REFUSES = "import sys; sys.stderr.write('error: train_dataset_names: got an empty data set\\n'); sys.exit(2)"
# Of a job that reads or writes streams; `end_training` says that training is complete.
HUB = """
import os, signal, sys, time
from pathlib import Path
from pipelinerl.config.resources import FileStreams, RedisStreams
from pipelinerl.records import PoolAnswer, ServerDropped, ServerReady, TrainerMessage, TrainingDone
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
root = Path(sys.argv[1])
hub = StreamHub(FileStreams(), RunDir(root))
def end_training(topic="trainer"):
    writer = hub.writer(topic, "finetune_0", TrainerMessage)
    writer.write(TrainingDone(version=3, time=time.time(), samples_processed=9))
    writer.close()
"""
FINISHES = f"{HUB}end_training()"
# Waits for the trainer's last message, as the actor does, and ends well.
FOLLOWS = f'{HUB}assert hub.reader("trainer", "finetune_0", TrainerMessage).read(timeout_s=200)'
# A server with a helper in a session of its own, whose parent is gone: nobody's group, nobody's child.
RUNAWAY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
    "'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)'], start_new_session=True)"],
    start_new_session=True)
time.sleep(300)
"""
WATCHES = """
import os, subprocess, sys, time
from pipelinerl.role import end_with_launcher
end_with_launcher()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
time.sleep(300)
"""
BEATS_THEN_STOPS = """
import os, signal, sys, time
from pathlib import Path
from pipelinerl.rundir.heartbeat import Heartbeat
def stuck_here():
    time.sleep(300)
heartbeat = Heartbeat(Path(sys.argv[1]) / sys.argv[2] / "heartbeat.json", 0.2).start()
if sys.argv[2] == "actor_0":
    with heartbeat.waiting("weights of version 0", deadline_s=1):
        stuck_here()
heartbeat.beat()
time.sleep(1)
os.kill(os.getpid(), signal.SIGSTOP)
"""


# A server with a helper in its session, which must be gone before the server is started again; notes each start.
COUNTS_STARTS = """
import os, subprocess, sys, time
from pathlib import Path
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with (Path(sys.argv[1]) / "starts").open("a") as file:
    file.write(f"{os.getpid()} {helper.pid}\\n")
time.sleep(300)
"""
# Beats until it is known to serve, then never again.
STOPS_BEATING = """
import os, sys, time
from pathlib import Path
from pipelinerl.rundir.heartbeat import Heartbeat
root = Path(sys.argv[1])
with (root / "starts").open("a") as file:
    file.write(f"{os.getpid()} 0\\n")
heartbeat = Heartbeat(root / sys.argv[2] / "heartbeat.json", 0.2)
while '"serving"' not in (root / "pool" / "servers.json").read_text():
    heartbeat.beat()
    time.sleep(0.1)
time.sleep(300)
"""
# Says of server 0 what the trainer says once it has the weights, then drops it.
DROPS = f"""{HUB}
writer = hub.writer("pool", "finetune_0", PoolAnswer)
writer.write(ServerReady(name="actor_llm_0", generation=0, version=0, time=time.time()))
writer.write(ServerDropped(name="actor_llm_0", generation=0, error="HTTP 500 boom", time=time.time()))
time.sleep(300)
"""
# Ignores SIGTERM, and so does a helper in a session of its own.
STUBBORN_WITH_HELPER = """
import os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
with (Path(sys.argv[1]) / "starts").open("a") as file:
    file.write(f"{os.getpid()} {helper.pid}\\n")
time.sleep(300)
"""
# A record of another kind in the stream that the launcher follows.
TALKS_NONSENSE = f"{HUB}end_training(topic='pool')\ntime.sleep(300)"


# Says that all servers have the weights, and once that is known that training is complete.
TRAINS = f"""{HUB}
pool = hub.writer("pool", "finetune_0", PoolAnswer)
servers = root / "pool" / "servers.json"
count = servers.read_text().count('"actor_llm_')
for index in range(count):
    pool.write(ServerReady(name="actor_llm_" + str(index), generation=0, version=0, time=time.time()))
pool.flush()
while servers.read_text().count('"serving"') < count:
    time.sleep(0.05)
# BEFORE THE END
end_training()
"""
# Loses the only server while it saves the model.
LOSES_ITS_SERVER = TRAINS.replace(
    "# BEFORE THE END",
    """
while not (root / "starts").exists() or not (root / "starts").read_text().endswith("\\n"):
    time.sleep(0.05)
os.kill(int((root / "starts").read_text().split()[0]), signal.SIGKILL)
while '"down"' not in servers.read_text():
    time.sleep(0.05)
""",
)
# Kills a server once training is done, and ends well when that is told.
EVALUATES = """
import os, signal, sys, time
from pathlib import Path
root = Path(sys.argv[1])
while "finetune_0 is done" not in (root / "launch.log").read_text():
    time.sleep(0.05)
while not (root / "server").exists():
    time.sleep(0.05)
os.kill(int((root / "server").read_text()), signal.SIGKILL)
end = time.monotonic() + 150
while '"down"' not in (root / "pool" / "servers.json").read_text():
    assert time.monotonic() < end, "nobody said that the server is gone"
    time.sleep(0.05)
"""


# Saves on SIGTERM, which takes a moment, as long as its server lives.
SAVES = """
import os, signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(0.5)
    (Path(sys.argv[1]) / "saved").write_text(str(Path("/proc", (Path(sys.argv[1]) / "server").read_text()).exists()))
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(300)
"""
SERVES = """
import os, sys, time
from pathlib import Path
root = Path(sys.argv[1])
(root / "server.new").write_text(str(os.getpid()))
(root / "server.new").rename(root / "server")
print("up", flush=True)
time.sleep(300)
"""


class Run:
    """A driver process and how to see what became of it."""

    def __init__(self, root: Path, jobs: dict[str, str], supervise: dict[str, Any], backend: str) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), str(root), json.dumps(jobs), json.dumps(supervise), backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RUN_MARK": str(root)},
        )
        self.seconds = 0.0

    def wait_started(self, count: int) -> None:
        """Block until `count` jobs are up (their logs say so, or they exist)."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.descendants()) < count:
            assert time.monotonic() < deadline, "the jobs did not start"
            threading.Event().wait(0.05)

    def descendants(self) -> list[psutil.Process]:
        """Everything that carries this run's mark in its environment, but the driver."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.process.pid and process.environ().get("RUN_MARK") == str(self.root):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def end(self, timeout_s: float = LIMIT_S) -> tuple[int, str, dict[str, Any]]:
        started = time.monotonic()
        _, stderr = self.process.communicate(timeout=timeout_s)
        self.seconds = time.monotonic() - started
        return self.process.returncode, stderr, json.loads((self.root / "summary.json").read_text())

    def kill_all(self) -> None:
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        for process in self.descendants():
            process.kill()
        self.process.wait()


class Starter:
    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, list[Run]()

    def __call__(self, jobs: dict[str, str], backend: str = "files", **supervise: Any) -> Run:
        self.runs.append(Run(self.root / f"run{len(self.runs)}", jobs, supervise, backend))
        return self.runs[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for run in starter.runs:
        run.kill_all()


def test_l8_a_fast_run_completes_and_leaves_nothing(start: Starter) -> None:
    run = start({"actor_llm_0": SLEEP, "actor_0": FOLLOWS, "preprocessor_0": FOLLOWS, "finetune_0": FINISHES})
    code, stderr, summary = run.end()
    assert (code, summary["status"], summary["reason"]) == (0, "completed", None), stderr
    assert run.descendants() == []


def test_a_run_with_a_redis_server_of_its_own(start: Starter) -> None:
    jobs = {"actor_0": FOLLOWS, "finetune_0": FINISHES}
    redis = {name: source.replace("FileStreams()", "RedisStreams(backend='redis')") for name, source in jobs.items()}
    run = start(redis, backend="redis")
    code, stderr, summary = run.end()
    assert (code, summary["status"]) == (0, "completed"), stderr
    assert (run.root / "redis" / "redis.log").is_file()
    assert "bye" in (run.root / "redis" / "redis.log").read_text()  # the server said that it ended


def test_l3_a_job_that_raises_is_named_with_its_error(start: Starter) -> None:
    run = start({"actor_llm_0": STUBBORN, "actor_0": RAISES, "finetune_0": SLEEP}, shutdown_grace_s=1)
    code, stderr, summary = run.end()
    assert code == 1
    assert "actor_0" in stderr and "ValueError: bad row 7" in stderr
    assert summary["status"] == "failed" and "bad row 7" in summary["reason"]
    assert run.descendants() == []


def test_a_signal_is_not_explained_with_an_older_error(start: Starter) -> None:
    expected = {
        "SIGKILL": "out of memory",
        "SIGTERM": "",
        "SIGSEGV": "Fatal Python error: Segmentation fault (<string>:11)",
    }
    jobs = {"actor_llm_0": SLEEP, "actor_0": SLEEP}
    runs = [
        start({**jobs, "finetune_0": IS_KILLED.replace("SIGNAL", signum)}, shutdown_grace_s=1) for signum in expected
    ]
    for run, (signum, text) in zip(runs, expected.items(), strict=True):
        code, stderr, summary = run.end()
        assert code == 1
        [what, where] = summary["reason"].splitlines()
        assert what.startswith("finetune_0 ") and signum in what and text in what, stderr
        assert where.endswith(str(run.root / "finetune_0" / "stderr.log"))
        assert [word for word in ("ValueError", "INFO", "it went on", "step 8") if word in what] == []


def test_a_user_error_of_a_job_is_the_launchers_exit_code_2(start: Starter) -> None:
    run = start({"actor_llm_0": SLEEP, "actor_0": REFUSES})
    code, stderr, _ = run.end()
    assert code == 2
    assert "actor_0: train_dataset_names: got an empty data set" in stderr
    assert "Traceback" not in stderr


def test_l5_sigkill_of_any_child_ends_the_run(start: Starter) -> None:
    jobs = {"actor_llm_0": SLEEP, "actor_0": STUBBORN, "finetune_0": SLEEP}
    runs = {victim: start(jobs, shutdown_grace_s=1, max_server_restarts=0) for victim in jobs}
    for index, run in enumerate(runs.values()):
        run.wait_started(3)
        sorted(run.descendants(), key=lambda process: process.create_time())[index].kill()
    for victim, run in runs.items():
        code, stderr, summary = run.end()
        assert code == 1
        assert victim in summary["reason"] and "killed by SIGKILL" in stderr
        assert run.descendants() == []


def test_l5_a_signal_ends_everything_that_ignores_sigterm_too(start: Starter) -> None:
    jobs = {"actor_llm_0": STUBBORN, "actor_0": SLEEP, "finetune_0": SLEEP}
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    runs = {signum: start(jobs, shutdown_grace_s=2) for signum in codes}
    for signum, run in runs.items():
        run.wait_started(3)
        run.process.send_signal(signum)
    for signum, run in runs.items():
        returncode, _, summary = run.end()
        assert (returncode, summary["status"]) == (codes[signum], "interrupted")
        assert summary["reason"] == f"stopped by {signum.name}"
        assert run.descendants() == []


def wait_up(run: Run, *jobs: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    logs = [run.root / job / "stdout.log" for job in jobs]
    while not all(log.exists() and "up" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, "the jobs did not start"
        threading.Event().wait(0.05)


def test_preemption_lets_the_trainer_save_while_its_servers_live(start: Starter) -> None:
    run = start({"actor_llm_0": SERVES, "actor_0": SLEEP, "finetune_0": SAVES}, shutdown_grace_s=60)
    wait_up(run, "actor_llm_0", "finetune_0")
    run.process.send_signal(signal.SIGTERM)
    returncode, _, summary = run.end()
    assert (returncode, summary["status"]) == (143, "interrupted")
    assert (run.root / "saved").read_text() == "True"
    assert run.descendants() == []


def test_a_trainer_that_hangs_when_it_is_asked_to_save_says_where(start: Starter) -> None:
    run = start({"actor_0": SLEEP, "finetune_0": STUBBORN}, shutdown_grace_s=2)
    wait_up(run, "finetune_0")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[2]["status"] == "interrupted"
    assert "most recent call first" in (run.root / "finetune_0" / "stderr.log").read_text()
    assert run.descendants() == []


def test_a_second_signal_does_not_wait_for_the_trainer(start: Starter) -> None:
    run = start({"actor_0": SLEEP, "finetune_0": STUBBORN_AND_SAYS_SO}, shutdown_grace_s=10 * LIMIT_S)
    wait_up(run, "finetune_0")
    run.process.send_signal(signal.SIGTERM)
    # Two signals that the launcher has not looked at yet would be one.
    wait_until("the first signal", lambda: "asked" in (run.root / "finetune_0" / "stdout.log").read_text())
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.descendants() == []


def test_l5_a_descendant_that_left_its_group_is_ended(start: Starter) -> None:
    run = start({"actor_llm_0": RUNAWAY, "actor_0": SLEEP}, shutdown_grace_s=1)
    run.wait_started(3)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.descendants() == []


def test_l9_a_killed_launcher_takes_its_children_along(start: Starter) -> None:
    run = start({"actor_llm_0": WATCHES, "actor_0": WATCHES})
    run.wait_started(4)
    children = run.descendants()
    run.process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [] and run.descendants() == []


def wait_until(what: str, condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


def log_of(run: Run) -> str:
    file = run.root / "launch.log"
    return file.read_text() if file.exists() else ""


def starts_of(run: Run) -> list[tuple[int, int]]:
    """(server, its helper) for every start."""
    file = run.root / "starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(server), int(helper)) for server, helper in (line.split() for line in lines)]


def test_a_killed_server_is_started_again_until_the_cap_is_reached(start: Starter) -> None:
    jobs = {"actor_llm_0": COUNTS_STARTS, "actor_0": SLEEP, "finetune_0": SLEEP}
    run = start(jobs, max_server_restarts=2, server_restart_backoff_s=0.1)
    for number in range(3):
        wait_until(f"start {number}", lambda wanted=number + 1: len(starts_of(run)) == wanted)
        server, helper = starts_of(run)[-1]
        os.kill(server, signal.SIGKILL)
        wait_until("the helper's end", lambda pid=helper: not psutil.pid_exists(pid))
    code, stderr, summary = run.end()
    assert code == 1
    assert "actor_llm_0" in stderr and "SIGKILL" in stderr
    assert "2 restarts (supervise.max_server_restarts)" in summary["reason"]
    assert run.descendants() == []


def test_l1_a_server_that_the_trainer_dropped_is_started_again(start: Starter) -> None:
    run = start({"actor_llm_0": COUNTS_STARTS, "actor_0": SLEEP, "finetune_0": DROPS}, server_restart_backoff_s=0)
    wait_until("the second start", lambda: len(starts_of(run)) == 2)
    run.process.send_signal(signal.SIGTERM)
    _, _, summary = run.end()
    assert summary["status"] == "interrupted"
    assert "HTTP 500 boom" in (run.root / "launch.log").read_text()
    lines = [file.read_text() for file in (run.root / "streams" / "pool" / "launch").rglob("*.jsonl")]
    events = [json.loads(line)["event"] for text in lines for line in text.splitlines()]
    assert events == ["down", "up"]
    assert run.descendants() == []


def test_a_server_that_stopped_responding_is_started_again(start: Starter) -> None:
    ready = DROPS.replace("writer.write(ServerDropped", "str(ServerDropped")
    jobs = {"actor_llm_0": STOPS_BEATING, "actor_0": SLEEP, "finetune_0": ready}
    run = start(jobs, heartbeat_timeout_s=2, server_restart_backoff_s=0)
    wait_until("the second start", lambda: len(starts_of(run)) >= 2)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert "heartbeat" in (run.root / "launch.log").read_text()


def test_a_server_that_dies_after_training_is_told_to_the_actor_and_harms_nobody(start: Starter) -> None:
    jobs = {"actor_llm_0": SERVES, "actor_llm_1": SLEEP, "actor_0": EVALUATES, "finetune_0": TRAINS}
    code, stderr, summary = start(jobs).end()
    assert (code, summary["status"]) == (0, "completed"), stderr


def test_the_only_server_that_dies_after_training_ends_the_run_at_once(start: Starter) -> None:
    """Whether the trainer runs on this node or elsewhere."""
    servers = {"actor_llm_0": COUNTS_STARTS, "actor_0": SLEEP}
    runs = {
        job: start({**servers, job: TRAINS}, server_restart_backoff_s=0) for job in ("finetune_0", "preprocessor_0")
    }
    for job, run in runs.items():
        wait_until("the end of training", lambda job=job, run=run: f"{job} is done" in log_of(run))
        wait_until("the server's start", lambda run=run: len(starts_of(run)) == 1)
        os.kill(starts_of(run)[0][0], signal.SIGKILL)
    for run in runs.values():
        code, stderr, _ = run.end()
        assert code == 1
        assert "actor_llm_0" in stderr and "SIGKILL" in stderr and "last evaluation" in stderr
        assert len(starts_of(run)) == 1


def test_the_only_server_that_dies_while_the_model_is_saved_ends_the_run_with_the_training(start: Starter) -> None:
    jobs = {"actor_llm_0": COUNTS_STARTS, "actor_0": SLEEP, "finetune_0": LOSES_ITS_SERVER}
    run = start(jobs, server_restart_backoff_s=300)
    code, stderr, summary = run.end()
    assert (code, summary["status"]) == (1, "failed")
    assert "actor_llm_0" in stderr and "last evaluation" in stderr
    assert len(starts_of(run)) == 1 and run.descendants() == []


def test_a_stuck_server_is_not_missed_after_training_either(start: Starter) -> None:
    """It may not be started again, and need not be."""
    stuck = STOPS_BEATING.replace(
        """'"serving"' not in (root / "pool" / "servers.json")""",
        """"finetune_0 is done" not in (root / "launch.log")""",
    )
    kill = """while not (root / "server").exists():
    time.sleep(0.05)
os.kill(int((root / "server").read_text()), signal.SIGKILL)
"""
    waits_for_news = EVALUATES.replace(kill, "")
    assert kill in EVALUATES and "launch.log" in stuck
    jobs = {"actor_llm_0": stuck, "actor_llm_1": SLEEP, "actor_0": waits_for_news, "finetune_0": TRAINS}
    code, stderr, summary = start(jobs, heartbeat_timeout_s=8, max_server_restarts=0).end()
    assert (code, summary["status"]) == (0, "completed"), stderr


def test_a_server_that_dies_when_the_actor_is_done_is_not_missed(start: Starter) -> None:
    ends_well = EVALUATES.split("end = ")[0]  # the server's end is heard first, the actor's right behind it
    jobs = {"actor_llm_0": SERVES, "actor_0": ends_well, "finetune_0": TRAINS}
    code, stderr, summary = start(jobs).end()
    assert (code, summary["status"]) == (0, "completed"), stderr


def test_a_removed_server_that_ignores_sigterm_is_killed_with_its_helpers(start: Starter) -> None:
    jobs = {"actor_llm_0": STUBBORN_WITH_HELPER, "actor_llm_1": SLEEP, "actor_0": SLEEP}
    run = start(jobs, shutdown_grace_s=1)
    wait_until("the start", lambda: len(starts_of(run)) == 1)
    wait_until("all jobs", lambda: len(run.descendants()) == 4)
    assert ask(RunDir(run.root), PoolRequest("remove", "actor_llm_0"), LIMIT_S) == "actor_llm_0"
    wait_until("the end of the server and of its helper", lambda: len(run.descendants()) == 2)
    wait_until("nothing is left of them", lambda: not any(psutil.pid_exists(pid) for pid in starts_of(run)[0]))
    assert run.process.poll() is None, "the run goes on without it"
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[2]["status"] == "interrupted"


def test_a_launcher_that_cannot_hear_the_trainer_any_more_says_so(start: Starter) -> None:
    run = start({"actor_llm_0": SLEEP, "actor_0": SLEEP, "finetune_0": TALKS_NONSENSE})
    code, stderr, summary = run.end()
    assert (code, summary["status"]) == (1, "failed")
    reason = summary["reason"]
    assert reason.startswith("launch: ") and "pool" in reason
    assert reason in stderr and run.descendants() == []


def test_jobs_that_never_finish_after_training_fail_the_run(start: Starter) -> None:
    run = start({"actor_llm_0": SLEEP, "actor_0": SLEEP, "finetune_0": FINISHES}, finish_timeout_s=1)
    code, stderr, _ = run.end()
    assert code == 1 and "actor_0 did not end within 1 s" in stderr


def test_a_wait_beyond_its_deadline_is_named_with_the_place(start: Starter) -> None:
    code, stderr, _ = start({"actor_0": BEATS_THEN_STOPS, "actor_llm_0": SLEEP}).end()
    assert code == 1
    assert "actor_0" in stderr and "weights of version 0" in stderr
    assert "stuck_here" in stderr


def test_a_stopped_process_is_named(start: Starter) -> None:
    run = start({"finetune_0": BEATS_THEN_STOPS, "actor_llm_0": SLEEP}, heartbeat_timeout_s=2, shutdown_grace_s=1)
    code, stderr, _ = run.end()
    assert code == 1 and "finetune_0" in stderr and "heartbeat" in stderr
    assert run.descendants() == []


def test_a_program_that_cannot_be_started(start: Starter) -> None:
    code, stderr, _ = start({"actor_llm_0": SLEEP, "actor_0": "!/no/such/program"}).end()
    assert code == 1 and "actor_0" in stderr and "/no/such/program" in stderr


def test_o5_secrets_are_not_in_the_run_directory(start: Starter) -> None:
    run = start({"actor_llm_0": SLEEP, "actor_0": FOLLOWS, "finetune_0": FINISHES})
    run.end()
    for file in run.root.rglob("*"):
        assert not file.is_file() or b"token-of-test" not in file.read_bytes()


def test_vllm_creates_its_sockets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract with vLLM: the key's name."""
    network_utils = pytest.importorskip("vllm.utils.network_utils")
    with server_sockets({}) as environ:
        monkeypatch.setenv(SOCKET_FOLDER_KEY, environ[SOCKET_FOLDER_KEY])
        path = network_utils.get_open_zmq_ipc_path()
        assert path.startswith(f"ipc://{environ[SOCKET_FOLDER_KEY]}/")
        assert len(path.removeprefix("ipc://")) == len(environ[SOCKET_FOLDER_KEY]) + 37
