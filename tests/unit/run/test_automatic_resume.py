"""`supervise.max_restarts`: which ends the launcher goes on after, how often, and what it says."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import pipelinerl.launch as launch_module
from pipelinerl.config import RunConfig
from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.run.monitor import StuckMonitor
from pipelinerl.run.policy import ExitPolicy
from pipelinerl.run.processes import ChildExited, Interrupted
from pipelinerl.run.restarts import can_resume
from pipelinerl.run.server_keeper import ServerKeeper
from pipelinerl.run.start import JOB_KEY, Command
from pipelinerl.run.supervisor import Outcome, Supervisor
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job

COMPLETED = Outcome("completed", None, 0)
INTERRUPTED = Outcome("interrupted", "stopped by SIGTERM", 143)


def died(job: str) -> Outcome:
    return Outcome("failed", f"{job} was killed by SIGKILL.\nIts log: x", 1, job)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (died("finetune_3"), True),
        (died("actor_0"), True),
        (died("preprocessor_0"), True),
        (died("actor_llm_0"), False),  # a server is started again in place; this is the end of its cap
        (died("launch"), False),
        (Outcome("failed", "actor_0: train_dataset_names is empty", 2, "actor_0"), False),
        (INTERRUPTED, False),
        (COMPLETED, False),
    ],
)
def test_which_ends_can_be_resumed(outcome: Outcome, expected: bool) -> None:
    assert can_resume(outcome.status, outcome.exit_code, outcome.job) is expected


@pytest.mark.parametrize(
    ("max_restarts", "outcomes", "starts", "code"),
    [
        (0, [died("finetune_0")], 1, 1),
        (2, [died("finetune_0"), died("actor_0"), COMPLETED], 3, 0),
        (2, [died("finetune_0"), died("actor_0"), died("finetune_0")], 3, 1),
        (5, [died("finetune_0"), INTERRUPTED], 2, 143),
        (5, [died("actor_llm_0")], 1, 1),
        (5, [replace(died("finetune_0"), signum=15)], 1, 1),
    ],
)
def test_how_often(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    max_restarts: int,
    outcomes: list[Outcome],
    starts: int,
    code: int,
) -> None:
    seen: list[tuple[bool, list[str]]] = []  # (starts anew, reasons so far)

    def launch_once(composed: Any, config: RunConfig, cluster: Any, restarts: list[str]) -> Outcome:
        seen.append((config.force_restart, list(restarts)))
        return outcomes[len(seen) - 1]

    monkeypatch.setattr(launch_module, "launch_once", launch_once)
    config = RunConfig.model_validate(
        {
            "output_dir": "x",
            "force_restart": True,
            "supervise": {"max_restarts": max_restarts},
        }
    )
    with caplog.at_level(logging.WARNING):
        assert launch_module.launch(SimpleNamespace(), config, SimpleNamespace()) == code  # type: ignore[arg-type]
    assert len(seen) == starts
    assert [force for force, _ in seen] == [True] + [False] * (starts - 1)
    assert seen[-1][1] == [f"{outcome.job} was killed by SIGKILL." for outcome in outcomes[: starts - 1]]
    if starts > 1:
        text = f"the run goes on by itself (1 of {max_restarts} restarts)"
        assert text in capsys.readouterr().err and text in caplog.text


@pytest.mark.parametrize("signums", [[], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_a_signal_while_a_run_fails_is_in_its_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signums: list[int]
) -> None:
    """The supervisor has its outcome and takes no more events; processes are being ended, the summary is written."""

    def fails(*arguments: Any) -> Outcome:
        for signum in signums:
            os.kill(os.getpid(), signum)
        return died("finetune_0")

    for name in ("check_start", "enter", "build_world_map"):
        monkeypatch.setattr(launch_module, name, MagicMock())
    for name in ("other_nodes", "FreePorts"):
        monkeypatch.setattr(launch_module, name, lambda *arguments, **_: nullcontext(MagicMock()))
    monkeypatch.setattr(launch_module, "_run", fails)
    monkeypatch.setattr(launch_module, "bounded_by_record", lambda config: config)
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    outcome = launch_module.launch_once(MagicMock(), config, MagicMock(), [])
    assert outcome == replace(died("finetune_0"), signum=signums[0] if signums else None)


class SignalBehindEachEnd(SimpleQueue[Any]):
    """The launcher gets SIGTERM right after a process of the run ended."""

    def put(self, item: Any, *arguments: Any) -> None:
        super().put(item, *arguments)
        if isinstance(item, ChildExited):
            super().put(Interrupted(signal.SIGTERM))


def test_a_signal_ends_the_search_for_the_cause_of_a_failure(tmp_path: Path) -> None:
    """With several nodes the cause may take a while to be heard of: 60 s here."""
    job = Job("actor", "actor_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    argv = (sys.executable, "-c", "raise ValueError('bad row 7')")
    read_end, write_end = os.pipe()
    started = time.monotonic()
    outcome = Supervisor(
        commands=[Command(job, argv, {JOB_KEY: job.name})],
        run_dir=RunDir(tmp_path),
        config=SuperviseConfig(),
        policy=ExitPolicy([job], lambda: False),
        monitor=StuckMonitor(SuperviseConfig(), 60.0),
        environ=os.environ,
        token="token-of-test",
        death_fd=read_end,
        events=SignalBehindEachEnd(),
        keeper=ServerKeeper([job], SuperviseConfig(), 60.0, lambda change: None, 0, time.time()),
        collect_s=60.0,
    ).run()
    os.close(read_end)
    os.close(write_end)
    assert (outcome.status, outcome.exit_code, outcome.job) == ("failed", 1, "actor_0")
    assert "bad row 7" in str(outcome.reason) and time.monotonic() - started < 40
