"""Two starts of a run in W&B's own files."""

from __future__ import annotations

import time
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.tracking.wandb_sink import WandbSink


def test_two_starts_of_a_run_with_the_real_wandb(tmp_path: Path) -> None:
    """The files of both starts are of one W&B run."""
    run = RunConfig.model_validate({"output_dir": str(tmp_path), "wandb": {"mode": "offline"}})
    for start in (0, 1):
        write_identity(RunDir(tmp_path).identity_file, RunIdentity(run_id="math-0a1b2c3d", incarnation=start))
        sink = WandbSink(SinkInputs(run, RunDir(tmp_path), 0.0))
        sink.log(MetricRecord(source="finetune_0", step=start, time=1.0, values={"finetune/loss": 0.5}))
        sink.finish({"status": "completed", "steps": 1})
        # W&B names its folders by the second.
        ended = int(time.time())
        while int(time.time()) == ended:
            time.sleep(0.05)
    folders = sorted(path for path in tmp_path.rglob("offline-run-*") if path.is_dir())
    assert len(folders) == 2 and all(folder.name.endswith("-math-0a1b2c3d") for folder in folders)
    assert all(list(folder.glob("run-*.wandb")) for folder in folders)
