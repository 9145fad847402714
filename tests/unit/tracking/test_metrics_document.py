"""docs/metrics.md and the code name the same metrics: each name one line, no line without a metric."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes.metrics_page import explained_names, pattern_of, unexplained

import pipelinerl
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.config.resources import FileStreams
from pipelinerl.preprocess.main import Outputs
from pipelinerl.preprocess.scoring import Rejection
from pipelinerl.records import EvaluationResult, MetricRecord, Sample, WeightUpdateSuccess
from pipelinerl.rl.diagnostics import StepDiagnostics
from pipelinerl.rl.losses import LossInputs
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tracking.collector import Collector
from pipelinerl.weights.sync import UpdateReport

PACKAGE = Path(pipelinerl.__file__).parent
RECORDING_PACKAGES = ("actor", "finetune", "preprocess", "rl", "tracking")
NAME = re.compile(r"(actor|finetune|preprocessor|rl)/[a-z][a-z0-9_/]*")


def names_in_source() -> Iterator[str]:
    """String constants that look like a metric; a formatted part of one reads `x`."""
    for package in RECORDING_PACKAGES:
        for file in sorted((PACKAGE / package).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                text = ""
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
                    text = "".join(map(str, parts))
                    if not text.startswith("actor/"):
                        continue  # The other formatted names are found by running the code that builds them.
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                    text = node.value
                if NAME.fullmatch(text):
                    yield text


def diagnostics() -> set[str]:
    """Names that the code puts together at run time."""
    one = torch.zeros(1, 1)
    inputs = LossInputs(
        new_logprobs=one,
        old_logprobs=one,
        advantages=one,
        mask=one == 0,
        weights=one,
        segment_ids=one.long(),
        versions=one.long(),
        num_segments=1,
        step_tokens=1,
    )
    return set(StepDiagnostics.of(inputs, 5.0).values())


def preprocessor_counters(folder: Path) -> set[str]:
    hub = StreamHub(FileStreams(), RunDir(folder), "run")
    outputs = Outputs(hub, "preprocessor_0", 0, FinetuneConfig(), 1)
    sample = Sample(
        id="0-0/r0/s0",
        group_id="0-0",
        rollout_id="0-0/r0",
        input_ids=[1],
        labels=[-100],
        logprobs=[],
        reward=0.0,
        finished=True,
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=0,
        version_spans=[],
    )
    outputs.write_fates([Rejection(sample, "stale", "max_version_lag")], 0)
    outputs.write_metrics(1, 0.0, {})
    outputs.close()
    reader = hub.reader("metrics", "preprocessor_0", MetricRecord)
    (entry,) = reader.read(timeout_s=5)
    reader.close()
    return set(entry.record.values)


def collected(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the collector makes of evaluations and weight updates."""
    names: set[str] = set()
    collector = Collector.__new__(Collector)
    for attribute in ("_lock", "_state", "_display"):
        monkeypatch.setattr(collector, attribute, _Anything(), raising=False)
    monkeypatch.setattr(collector, "_display_works", False, raising=False)
    monkeypatch.setattr(collector, "_since", 0.0, raising=False)
    monkeypatch.setattr(collector, "_log", lambda record: names.update(record.values), raising=False)
    collector._on_evaluation(
        EvaluationResult(
            due_version=0,
            min_version=0,
            max_version=0,
            is_final=False,
            dataset_name="test",
            num_rollouts=1,
            num_failed=0,
            success_rate=1.0,
            mean_reward=1.0,
            metrics={"turns": 1.0},
            seconds=1.0,
            time=1.0,
        )
    )
    seconds = UpdateReport(version=1).seconds
    update = WeightUpdateSuccess(version=1, time=1.0, seconds=seconds, num_servers=1, probe_abs_diff=0.0, sent_bytes=8)
    collector._on_trainer(update)
    return names


class _Anything:
    """Takes any call, and is a context manager."""

    def __getattr__(self, name: str):
        return lambda *args, **options: None

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return {*names_in_source(), *diagnostics(), *preprocessor_counters(tmp_path), *collected(monkeypatch)}


def test_every_recorded_metric_is_explained(recorded: set[str]) -> None:
    assert len(recorded) > 60
    assert unexplained(recorded) == []


def test_every_line_of_the_page_is_a_recorded_metric(recorded: set[str]) -> None:
    names = explained_names()
    assert len(set(names)) == len(names), "one line each"
    assert [name for name in names if not any(pattern_of(name).fullmatch(found) for found in recorded)] == []


def test_a_name_that_is_not_in_the_page_is_found() -> None:
    assert unexplained(["time", "finetune/loss", "actor/server_busy_12", "finetune/losses"]) == ["finetune/losses"]
