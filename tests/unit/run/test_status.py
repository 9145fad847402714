"""`status`: alive or not, what each process waits for and since when, on running and on ended runs."""

from __future__ import annotations

import fcntl
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from pipelinerl.__main__ import main
from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.records import StepDone, TrainerMessage, TrainerStarted
from pipelinerl.run.status import format_seconds, print_status, read_status
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import find_run
from pipelinerl.tracking.health import Finding, add_finding
from pipelinerl.world import Job, WorldMap


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    files = RunDir(tmp_path)
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "finetune": {"max_train_steps": 40}})
    write_identity(files.identity_file, RunIdentity(run_id="run-a", incarnation=1))
    save_config(config, files.config_file)
    names = ("actor", "preprocessor", "finetune")
    jobs = [Job(kind, f"{kind}_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1) for kind in names]
    files.world_file.write_text(WorldMap(jobs, "cpu", 1, "127.0.0.1", 1).to_json())
    writer = StreamHub(config.streams, files, "run-a").writer("trainer", "finetune_0", TrainerMessage)
    for step in (1, 2, 3):
        writer.write(StepDone(step=step, time=100.0 + step, group_ids=[], num_samples=1, samples_processed=1))
    writer.write(TrainerStarted(step=2, data_offset=2, time=110, incarnation=1))
    writer.close()
    files.training_state(2).mkdir(parents=True)
    return files


PID = 4711


@pytest.fixture
def living(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The trainer waits for data; its process is in the set, and exists as long as it is."""
    pids = {PID}

    def process(pid: int) -> SimpleNamespace:
        if pid not in pids:
            raise psutil.NoSuchProcess(pid)
        words = ["python", "--run-dir", str(run_dir.root), "--job", "finetune_0"]
        return SimpleNamespace(cmdline=lambda: words, status=lambda: psutil.STATUS_SLEEPING)

    monkeypatch.setattr("psutil.Process", process)
    beat = {"pid": PID, "time": 29.0, "progress": 7, "idle_s": 28.0}
    beat |= {"waiting_for": "training data", "waited_s": 28.0, "deadline_s": 90.0}
    run_dir.job("finetune_0").mkdir()
    run_dir.heartbeat_file("finetune_0").write_text(json.dumps(beat))
    return pids


def test_a_running_run(run_dir: RunDir, living: set[int]) -> None:
    lock = os.open(run_dir.root / "conf" / "launch.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        status = read_status(find_run(run_dir.root), now=31.0)
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
    assert (job.pid, job.waiting_for, job.deadline_s, job.progress) == (PID, "training data", 90, 7)
    assert job.waiting_s == 30


def test_an_ended_run_says_how(run_dir: RunDir, living: set[int]) -> None:
    living.clear()
    status = read_status(find_run(run_dir.root))
    assert status.state == "ended" and "the launcher was killed" in str(status.reason)
    assert not any(job.is_alive for job in status.jobs) and status.jobs[-1].waiting_for is None
    run_dir.summary_file.write_text(json.dumps({"status": "failed", "reason": "actor_0 died"}))
    add_finding(run_dir.findings_file, Finding(name="truncation", step=2, evidence="60% are cut", advice="Raise it."))
    status = read_status(find_run(run_dir.root))
    assert (status.state, status.reason) == ("failed", "actor_0 died")
    shown = io.StringIO()
    print_status(status, Console(file=shown, width=200))
    text = shown.getvalue()
    for words in (
        "run run-a",
        "failed (start 2)",
        "step 2 of 40",
        "reason: actor_0 died",
        "60% are cut",
        "never started",
    ):
        assert words in text


def test_another_process_with_the_same_id_is_not_the_job(run_dir: RunDir) -> None:
    folder = run_dir.job("actor_0")
    folder.mkdir()
    beat = {"pid": os.getpid(), "time": 1.0, "progress": 0}
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
    shown = [format_seconds(seconds) for seconds in (0.4, 59, 61, 3700, 90000)]
    assert shown == ["0 s", "59 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]
