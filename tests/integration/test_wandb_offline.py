"""Runs in the real W&B's own files, without a network."""

from __future__ import annotations

import json
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from pipelinerl.config import RunConfig
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.tracking.rollout_table import RolloutTable
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.tracking.wandb_sink import WandbSink

SUCCESS, LOSS = "evaluation/test/success_rate", "finetune/loss"
_HEADER, _BLOCK = 7, 32768


def records(folder: Path) -> Iterator[Record]:
    """What a run's `.wandb` file holds: a header, then blocks of parts (checksum, length, kind) as in LevelDB's log."""
    (file,) = folder.glob("run-*.wandb")
    data, position, record = file.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


class WandbFiles:
    """One start of a run, as W&B has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.metrics: dict[str, str] = {}
        for record in records(folder):
            if record.HasField("run"):
                self.run = record.run
                self.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("metric"):
                self.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            elif record.HasField("summary"):
                self.summary |= _values(record.summary.update)
            elif record.HasField("history"):
                self.rows.append(_values(record.history.item))

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(row["version"], row[name]) for row in self.rows if name in row]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def record(source: str, step: int, at: float, **values: float) -> MetricRecord:
    return MetricRecord(source=source, step=step, time=at, values=values)


def number(step: int, at: float, loss: float) -> MetricRecord:
    return record("finetune_0", step, at, **{LOSS: loss})


def success(step: int, at: float, rate: float) -> MetricRecord:
    return record("evaluation", step, at, **{SUCCESS: rate})


def start(run: RunConfig, incarnation: int, since: float) -> WandbSink:
    root = Path(run.output_dir)
    write_identity(RunDir(root).identity_file, RunIdentity(run_id="math-0a1b2c3d", incarnation=incarnation))
    return WandbSink(SinkInputs(run, RunDir(root), since))


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[WandbFiles]:
    """A run that ended after step 3, one step after its checkpoint, and its resume from there."""
    root = tmp_path_factory.mktemp("run")
    keys = {"mode": "offline", "tags": ["a"], "wandb_project_name": "p", "wandb_group": "g"}
    custom = {"custom": {"service": {"api_key_": "x", "auth-token": "hidden-value"}}}
    run = RunConfig.model_validate({"output_dir": str(root), "wandb": keys, "seed": 7, **custom})
    first = [
        success(0, 1.0, 0.25),
        number(1, 2.0, 0.5),
        number(2, 3.0, 0.4),
        success(2, 4.0, 0.75),
        number(3, 5.0, 0.3),
    ]
    second = [number(3, 11.0, 0.35), number(4, 12.0, 0.2), success(4, 13.0, 0.5)]
    table = RolloutTable("test", 2, ("prompt", "answer"), [("2+2", "<b>4</b> [x](http://y)\n=1")])
    for incarnation, (since, records) in enumerate(((0.0, first), (10.0, [*first, *second]))):
        sink = start(run, incarnation, since)
        for each in records:
            sink.log(each)
        if not incarnation:
            sink.log_rollouts(table)
        sink.finish({"status": "completed", "steps": 4, "seconds": 9.5, "mean_lag_versions": 1.25, "reason": None})
        # W&B names its folders by the second.
        ended = int(time.time())
        while int(time.time()) == ended:
            time.sleep(0.05)
    return [WandbFiles(path) for path in sorted(root.rglob("offline-run-*")) if path.is_dir()]


def test_both_starts_are_one_run_with_the_configuration(starts: list[WandbFiles]) -> None:
    assert len(starts) == 2
    for each in starts:
        assert each.folder.name.endswith("-math-0a1b2c3d")
        assert (each.run.run_id, each.run.project, each.run.run_group) == ("math-0a1b2c3d", "p", "g")
        assert each.run.resume and list(each.run.tags) == ["a"]
        assert each.config["seed"] == 7 and each.config["finetune"]["learning_rate"] > 0
        assert each.config["custom"]["service"] == {"api_key_": "x", "auth-token": "***"}
        assert (each.folder / "files" / "requirements.txt").stat().st_size


def test_every_metric_has_the_policy_version_as_its_axis_and_never_goes_back(starts: list[WandbFiles]) -> None:
    assert all(each.metrics["*"] == "version" for each in starts)
    assert [each.points(LOSS) for each in starts] == [[(1, 0.5), (2, 0.4), (3, 0.3)], [(4, 0.2)]]
    assert [each.points(SUCCESS) for each in starts] == [[(0, 0.25), (2, 0.75)], [(4, 0.5)]]


def test_the_summary_has_last_and_best_success_and_the_run(starts: list[WandbFiles]) -> None:
    last = starts[1].summary
    assert (last[SUCCESS], last[f"best/{SUCCESS}"], last[LOSS], last["version"]) == (0.5, 0.75, 0.2, 4)
    run = {name: value for name, value in last.items() if name.startswith("run/")}
    assert run == {"run/status": "completed", "run/steps": 4, "run/seconds": 9.5, "run/mean_lag_versions": 1.25}


def test_rollouts_of_an_evaluation_are_a_table_of_plain_text(starts: list[WandbFiles]) -> None:
    (row,) = [row for row in starts[0].rows if "evaluation/test/rollouts/path" in row]
    assert (row["version"], row["evaluation/test/rollouts/_type"]) == (2, "table-file")
    stored = json.loads((starts[0].folder / "files" / row["evaluation/test/rollouts/path"]).read_text())
    assert stored == {"columns": ["prompt", "answer"], "data": [["2+2", "<b>4</b> [x](http://y)\n=1"]]}


def test_the_repository_is_named_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "remote", "add", "origin", "https://me:hunter2@example.org/x.git"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(code)
    run = RunConfig.model_validate({"output_dir": str(tmp_path / "run"), "wandb": {"mode": "offline"}})
    (tmp_path / "run").mkdir()
    start(run, 0, 0.0).finish({"status": "failed"})
    (folder,) = [path for path in (tmp_path / "run").rglob("offline-run-*") if path.is_dir()]
    assert WandbFiles(folder).run.git.commit == commit
    assert b"hunter2" not in next(folder.glob("run-*.wandb")).read_bytes()
