"""A run's numbers as Prometheus reads them, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.config import RunConfig
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir
from pipelinerl.tracking.prometheus_sink import PrometheusSink, prometheus_name
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.world import Job, WorldMap

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[PrometheusSink]:
    run_dir = RunDir(tmp_path)
    run_dir.world_file.parent.mkdir()
    server = Job("actor_llm", "actor_llm_0", 0, 0, 0, "127.0.0.1", [], 8123, "http://127.0.0.1:8123", None, 1)
    run_dir.world_file.write_text(WorldMap([server], "cpu", 1, "127.0.0.1", 1).to_json())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = RunConfig(output_dir=str(tmp_path), tracking={"prometheus_port": port})
    made = PrometheusSink(SinkInputs(config, run_dir, 0.0))
    yield made
    made.finish({})


def read(sink: PrometheusSink) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def log(sink: PrometheusSink, step: int, **values: float) -> None:
    sink.log(MetricRecord(source="x", step=step, time=0.0, values=values))


def test_the_newest_values_are_served(sink: PrometheusSink) -> None:
    log(sink, 1, **{"finetune/loss": 0.5, "finetune/ess": 0.9})
    log(sink, 1, **{"health/truncation": 1.0})
    log(sink, 2, **{"actor/server_busy_0": 7.0, "actor/server_busy_1": 8.0, "actor/failed_bad_reward": 3.0})
    log(sink, 2, **{'actor/odd "set"/reward': 0.25, "evaluation/a/b/success_rate": 0.5})
    first = read(sink)
    assert first["pipelinerl_health", (("finding", "truncation"),)] == 1.0
    log(sink, 2, **{"finetune/loss": float("nan"), "finetune/ess": 0.8})
    found = read(sink)
    assert found.pop(("pipelinerl_finetune_loss", ())) != 0.5
    assert found == {
        ("pipelinerl_step", ()): 2.0,
        ("pipelinerl_server_info", (("server", "actor_llm_0"), ("url", "http://127.0.0.1:8123/metrics"))): 1.0,
        ("pipelinerl_finetune_ess", ()): 0.8,
        ("pipelinerl_actor_server_busy", (("server", "0"),)): 7.0,
        ("pipelinerl_actor_server_busy", (("server", "1"),)): 8.0,
        ("pipelinerl_actor_failed", (("reason", "bad_reward"),)): 3.0,
        ("pipelinerl_actor_dataset", (("dataset", 'odd "set"'), ("metric", "reward"))): 0.25,
        ("pipelinerl_evaluation", (("dataset", "a/b"), ("metric", "success_rate"))): 0.5,
    }


def test_a_taken_port_is_an_error_of_the_sink_alone(sink: PrometheusSink, tmp_path: Path) -> None:
    config = RunConfig(output_dir=str(tmp_path), tracking={"prometheus_port": sink.port})
    with pytest.raises(OSError):
        PrometheusSink(SinkInputs(config, RunDir(tmp_path), 0.0))


def test_the_dashboard_shows_numbers_that_there_are() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = {prometheus_name(name)[0] for name in re.findall(r"^\| `([^`]+/[^`]+)` \|", page, re.MULTILINE)}
    documented |= {"pipelinerl_health", "pipelinerl_weight_update_total_s", "pipelinerl_actor_server_busy"}
    documented |= {"pipelinerl_actor_failed"}
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_bytes())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"pipelinerl_\w+", target["expr"])
    }
    assert len(shown) > 15 and shown <= documented
