"""`status`: alive or not, what each process waits for and since when, on running and on ended runs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipelinerl.__main__ import main
from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted
from pipelinerl.run.status import format_seconds, print_status, read_status
from pipelinerl.rundir.identity import RunIdentity, write_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import find_run
from pipelinerl.world import Job, WorldMap

# A process that carries the run directory and its job's name in its arguments, and waits for something.
WAITS = """
import sys, time
from pathlib import Path
from pipelinerl.rundir.heartbeat import Heartbeat
heartbeat = Heartbeat(Path(sys.argv[2]) / sys.argv[4] / "heartbeat.json", 60)
heartbeat.progress(7)
with heartbeat.waiting("training data", deadline_s=90):
    heartbeat.beat()
    print("up", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    files = RunDir(tmp_path)
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "finetune": {"max_train_steps": 40}})
    write_identity(files.identity_file, RunIdentity(run_id="run-a", incarnation=1))
    save_config(config, files.config_file)
    names = ("actor", "preprocessor", "finetune")
    jobs = [Job(kind, f"{kind}_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1) for kind in names]
    files.world_file.write_text(WorldMap(jobs, "cpu", 1, 0, 1, "127.0.0.1", 1).to_json())
    writer = StreamHub(config.streams, files, "run-a").writer("trainer", "finetune_0", TrainerMessage)
    for step in (1, 2, 3):
        writer.write(StepDone(step=step, time=100.0 + step, group_ids=[], num_samples=1, samples_processed=1))
    writer.write(TrainerStarted(step=2, data_offset=2, time=110, incarnation=1))
    writer.close()
    files.training_state(2).mkdir(parents=True)
    return files


@pytest.fixture
def trainer(run_dir: RunDir) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WAITS, "--run-dir", str(run_dir.root), "--job", "finetune_0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()


def test_a_running_run(run_dir: RunDir, trainer: subprocess.Popen[str]) -> None:
    lock = os.open(run_dir.root / "conf" / "launch.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        status = read_status(find_run(run_dir.root), now=time.time() + 30)
    finally:
        os.close(lock)
    assert (status.run_id, status.starts, status.state) == ("run-a", 2, "running")
    # Step 3 was rolled back: the trainer went on from step 2.
    assert (status.step, status.max_steps, status.checkpoint) == (2, 40, 2)
    assert [(job.name, job.is_alive) for job in status.jobs] == [
        ("actor_0", False),
        ("preprocessor_0", False),
        ("finetune_0", True),
    ]
    job = status.jobs[-1]
    assert (job.pid, job.waiting_for, job.deadline_s, job.progress) == (trainer.pid, "training data", 90, 7)
    assert job.waiting_s is not None and 29 < job.waiting_s < 90


def test_an_ended_run_says_how(run_dir: RunDir, trainer: subprocess.Popen[str]) -> None:
    trainer.kill()
    trainer.wait()
    status = read_status(find_run(run_dir.root))
    assert status.state == "ended" and "the launcher was killed" in str(status.reason)
    assert not any(job.is_alive for job in status.jobs) and status.jobs[-1].waiting_for is None
    run_dir.summary_file.write_text(json.dumps({"status": "failed", "reason": "actor_0 died"}))
    status = read_status(find_run(run_dir.root))
    assert (status.state, status.reason) == ("failed", "actor_0 died")
    shown = io.StringIO()
    print_status(status, Console(file=shown, width=200))
    text = shown.getvalue()
    for words in ("run run-a", "failed (start 2)", "step 2 of 40", "reason: actor_0 died", "never started"):
        assert words in text


def test_another_process_with_the_same_id_is_not_the_job(run_dir: RunDir) -> None:
    folder = run_dir.job("actor_0")
    folder.mkdir()
    beat = {"pid": os.getpid(), "time": 1.0, "progress": 0, "progress_time": 1.0}
    (folder / "heartbeat.json").write_text(json.dumps(beat))
    assert not read_status(find_run(run_dir.root)).jobs[0].is_alive


def test_the_command(run_dir: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", str(run_dir.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert main(["audit", str(run_dir.root)]) == 1, "two steps without a batch"
    assert "NOT CLEAN" in capsys.readouterr().out
    assert main(["status", str(tmp_path / "nothing")]) == 2
    assert "expected a started run" in capsys.readouterr().err


def test_durations_are_short() -> None:
    assert [format_seconds(s) for s in (0.4, 59, 61, 3700, 90000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h 1 min",
        "1 d 1 h",
    ]
