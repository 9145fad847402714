"""Two starts of a run in the real Trackio's own files, read back from them, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
from pipelinerl.config import RunConfig
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.tracking.rollout_table import RolloutTable
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.tracking.trackio_sink import TrackioSink

root = Path(sys.argv[1])
keys = {"trackio_project": "p"}
run = RunConfig.model_validate({"output_dir": str(root), "tracking": keys, "custom": {"auth-token": "hidden-value"}})

def record(step, at, name, value):
    return MetricRecord(source="a", step=step, time=at, values={name: value})

success = "evaluation/test/success_rate"
first = [record(0, 1.0, success, 0.25), record(1, 2.0, "finetune/loss", 0.5), record(2, 3.0, "finetune/loss", 0.4)]
second = [record(2, 11.0, "finetune/loss", 0.45), record(3, 12.0, "finetune/loss", 0.3)]
incarnation = int(sys.argv[2])
write_identity(RunDir(root).identity_file, RunIdentity(run_id="math-0a1b2c3d", incarnation=incarnation))
sink = TrackioSink(SinkInputs(run, RunDir(root), 10.0 if incarnation else 0.0))
for each in [*first, *second] if incarnation else first:
    sink.log(each)
if not incarnation:
    sink.log_rollouts(RolloutTable("test", 0, ("prompt", "answer"), [("2+2", "<b>4</b>")]))
sink.finish({"status": "completed", "steps": 3, "seconds": 9.5, "reason": None})

from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("p")
print("READ", json.dumps([runs, SQLiteStorage.get_logs("p", runs[0]), SQLiteStorage.get_run_config("p", runs[0])]))
"""


def test_a_resumed_run_goes_on_in_its_trackio_run(tmp_path: Path) -> None:
    environ = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    (tmp_path / "run").mkdir()
    for start in ("0", "1"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), start]
        out = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert out.returncode == 0, out.stderr
    runs, rows, config = json.loads(out.stdout.partition("READ ")[2].splitlines()[0])
    assert runs == ["math-0a1b2c3d"]
    assert config["custom"] == {"auth-token": "***"} and config["seed"] == 42
    points = {name: [(row["step"], row[name]) for row in rows if name in row] for row in rows for name in row}
    assert points["finetune/loss"] == [(1, 0.5), (2, 0.4), (3, 0.3)]
    assert points["evaluation/test/success_rate"] == [(0, 0.25)]
    assert points["best/evaluation/test/success_rate"][-1] == (3, 0.25) and points["run/seconds"][-1] == (3, 9.5)
    ((_, table),) = points["evaluation/test/rollouts"]
    assert table["_value"] == [{"prompt": "2+2", "answer": "<b>4</b>"}]
