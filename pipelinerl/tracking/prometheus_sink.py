"""The newest value of every number of a run for Prometheus, at http://127.0.0.1:PORT/metrics.

Metrics are called `pipelinerl_<who>_<what>`; other parts of a name become labels:

| metric of a run                  | for Prometheus                                                         |
|----------------------------------|------------------------------------------------------------------------|
| `finetune/ess`                   | `pipelinerl_finetune_ess`                                              |
| `actor/server_busy_0`            | `pipelinerl_actor_server_busy{server="0"}`                             |
| `actor/failed_bad_reward`        | `pipelinerl_actor_failed{reason="bad_reward"}`                         |
| `preprocessor/filtered/too_long` | `pipelinerl_preprocessor_fate{fate="filtered", reason="too_long"}`     |
| `actor/gsm8k/reward`             | `pipelinerl_actor_dataset{dataset="gsm8k", metric="reward"}`           |
| `evaluation/gsm8k/success_rate`  | `pipelinerl_evaluation{dataset="gsm8k", metric="success_rate"}`        |
| `health/truncation`              | `pipelinerl_health{finding="truncation"}`                              |
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector as PrometheusCollector

from pipelinerl.records import MetricRecord
from pipelinerl.tracking.sinks import SinkInputs
from pipelinerl.world import WorldMap

_SERVER = re.compile(r"(actor/server_\w+)_(\d+)")
_FAILED = re.compile(r"(actor/failed)_(?!rollouts$)(\w+)")

Labels = tuple[tuple[str, str], ...]


def prometheus_name(name: str) -> tuple[str, Labels]:
    """Name and labels of a metric for Prometheus."""
    who, *parts = name.split("/")
    if found := _SERVER.fullmatch(name):
        return _plain(found[1]), (("server", found[2]),)
    if found := _FAILED.fullmatch(name):
        return _plain(found[1]), (("reason", found[2]),)
    if who == "health":
        return "pipelinerl_health", (("finding", "/".join(parts)),)
    if len(parts) > 1:
        middle, last = "/".join(parts[:-1]), parts[-1]
        if who == "preprocessor":
            return "pipelinerl_preprocessor_fate", (("fate", middle), ("reason", last))
        kind = "pipelinerl_evaluation" if who == "evaluation" else f"{_plain(who)}_dataset"
        return kind, (("dataset", middle), ("metric", last))
    return _plain(name), ()


def _plain(name: str) -> str:
    return "pipelinerl_" + re.sub(r"\W", "_", name)


class PrometheusSink(PrometheusCollector):
    """Serves the numbers of one run at `tracking.prometheus_port` on loopback. Raises OSError if the port is taken."""

    def __init__(self, inputs: SinkInputs) -> None:
        port = inputs.config.tracking.prometheus_port
        assert port is not None
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}
        self._step = 0
        world = WorldMap.from_json(inputs.run_dir.world_file.read_bytes())
        self._servers = [(job.name, job.url) for job in world.jobs_of("actor_llm") if job.url is not None]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    def log(self, record: MetricRecord) -> None:
        with self._lock:
            if "finetune/loss" in record.values:
                self._step = record.step
                self._values.pop("pipelinerl_health", None)  # findings last until the next step
            for name, value in record.values.items():
                family, labels = prometheus_name(name)
                self._values.setdefault(family, {})[labels] = value

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by the library for every request."""
        yield GaugeMetricFamily("pipelinerl_step", "Optimizer steps done.", value=self._step)
        servers = GaugeMetricFamily(
            "pipelinerl_server_info", "Where each server has its own numbers.", labels=("server", "url")
        )
        for name, url in self._servers:
            servers.add_metric((name, f"{url}/metrics"), 1.0)
        yield servers
        with self._lock:
            values = {family: dict(found) for family, found in self._values.items()}
        for family, found in sorted(values.items()):
            metric = GaugeMetricFamily(family, "See docs/metrics.md.", labels=[key for key, _ in next(iter(found))])
            for labels, value in found.items():
                metric.add_metric([text for _, text in labels], value)
            yield metric

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
