"""A model that is on the hub and not in its cache: what its `config.json` says is known before anything starts.

The hub is an HTTP server on loopback; the client is the real one, in a process of its own, because it reads its
environment when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHECK = """
import sys
from pipelinerl.config import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.run import preflight
from pipelinerl.world import Cluster
config = RunConfig.model_validate({
    "output_dir": "x", "model_path": "somebody/model", "finetune": {"lora": {"enabled": True, "sync": "adapter"}},
})
try:
    preflight.check_model(config)
    preflight.check_servers(config)
    preflight.check_adapter_servers(config, Cluster.from_env({}, lambda: [], 2))
    print("passes")
except UserError as error:
    print(error)
"""


class Hub(ThreadingHTTPServer):
    """Has one model with one file. `answers`: status of the answers to HEAD and GET."""

    daemon_threads = True

    def __init__(self, content: dict[str, Any], answers: dict[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body, self.answers, self.seen = json.dumps(content).encode(), answers, list[str]()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        status = self.server.answers.get(self.command, 200)
        self.server.seen.append(f"{self.command} {self.path}")
        self.send_response(status)
        body = self.server.body if status == 200 else b""
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing for the terminal."""


@pytest.fixture
def hubs() -> Iterator[list[Hub]]:
    started: list[Hub] = []
    yield started
    for hub in started:
        hub.shutdown()
        hub.server_close()


def check(
    hubs: list[Hub], home: Path, content: dict[str, Any], offline: bool = False, **answers: int
) -> tuple[str, Hub]:
    hub = Hub(content, answers)
    hubs.append(hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    place = {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}"}
    env = {**os.environ, **place, "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env = {key: value for key, value in env.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), hub


DENSE = {"model_type": "qwen2", "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (DENSE, "passes"),
        ({**DENSE, "num_experts": 8}, "somebody/model: it is a mixture of experts (num_experts=8)"),
        ({**DENSE, "quantization_config": {"bits": 4}}, "somebody/model: it is quantized"),
    ],
)
def test_what_an_adapter_cannot_be_served_with_is_refused(
    hubs: list[Hub], tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    text, hub = check(hubs, tmp_path, content)
    assert said in text
    assert {line.split("/resolve/")[1] for line in hub.seen} == {"main/config.json"}, (
        "nothing but config.json is fetched"
    )


def test_a_hub_that_does_not_give_the_file_leaves_the_rest_to_the_servers(hubs: list[Hub], tmp_path: Path) -> None:
    assert check(hubs, tmp_path, {**DENSE, "num_experts": 8}, GET=403)[0] == "passes"


def test_offline_nothing_is_asked(hubs: list[Hub], tmp_path: Path) -> None:
    text, hub = check(hubs, tmp_path, DENSE, offline=True)
    assert "HF_HUB_OFFLINE is set" in text and hub.seen == []
