"""What is written when a run ends, however it ends (line O1)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import pipelinerl.launch as launch_module
from pipelinerl.config import RunConfig
from pipelinerl.errors import StreamError
from pipelinerl.finetune.best_model import EvaluatedVersion, write_note
from pipelinerl.launch import supervise
from pipelinerl.run.processes import Outcome
from pipelinerl.run.start import RunSession
from pipelinerl.rundir.layout import RunDir, RunIdentity
from pipelinerl.tracking import collector as collector_module
from pipelinerl.world import WorldMap


@pytest.mark.parametrize("restarts", [(), ("finetune_0 ended",)])
def test_o1_a_summary_that_cannot_be_written_does_not_change_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restarts: tuple[str, ...]
) -> None:
    run_dir = RunDir(tmp_path)
    folder = run_dir.finetune / "evaluated" / "4"
    folder.mkdir(parents=True)
    note = EvaluatedVersion(version=4, due_version=4, incarnation=0, metric="success_rate", value=0.5, max_version=4)
    write_note(folder, note)
    run_dir.best_model.symlink_to("evaluated/4")
    config = RunConfig.model_validate(
        {"output_dir": str(tmp_path), "finetune": {"keep_best": "success_rate"}, "wandb": {"mode": "disabled"}}
    )
    outcome = Outcome("completed", None, 0)

    def refuse(path: Path, content: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(launch_module, "supervise_jobs", lambda session, hub, nodes: outcome)
    for module in (launch_module, collector_module):
        monkeypatch.setattr(module, "write_json", refuse)
    world = WorldMap([], "cpu", 1, "127.0.0.1", 29500)
    identity = RunIdentity(run_id="run-test", incarnation=0)
    session = RunSession(config, world, run_dir, identity, [], {}, "token-of-test", SimpleQueue(), restarts)
    assert supervise(session) is outcome
    assert "summary.json cannot be written" in caplog.text


def test_o1_a_stream_server_that_cannot_start_leaves_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: RunConfig) -> Any:
        raise StreamError("no free port")

    monkeypatch.setattr(launch_module, "backend_of", refuse)
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "wandb": {"mode": "disabled"}})
    world, identity = WorldMap([], "cpu", 1, "127.0.0.1", 29500), RunIdentity(run_id="run-test", incarnation=0)
    session = RunSession(config, world, RunDir(tmp_path), identity, [], {}, "token-of-test", SimpleQueue())
    with pytest.raises(StreamError):
        supervise(session)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "no free port" in summary["reason"]
