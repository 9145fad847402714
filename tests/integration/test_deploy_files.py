"""The files in `deploy/`, as the programs that read them see them, without a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CRDS = os.environ.get("KUBERAY_CRDS", "")
LOAD = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.num_nodes, *task.resources)
"""


def unknown_keys(schema: dict[str, Any], value: Any, place: str = "") -> Iterator[str]:
    """What Kubernetes would drop without a word."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from unknown_keys(schema.get("items", {}), each, f"{place}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        for key, each in value.items():
            if key not in schema["properties"]:
                yield f"{place}.{key}"
            yield from unknown_keys(schema["properties"].get(key, {}), each, f"{place}.{key}")


@pytest.mark.skipif(not CRDS, reason="KUBERAY_CRDS does not name the folder with KubeRay's ray.io_rayjobs.yaml")
def test_kuberays_schema_accepts_the_job() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load((Path(CRDS) / "ray.io_rayjobs.yaml").read_text(encoding="utf-8"))
    (schema,) = (
        version["schema"]["openAPIV3Schema"] for version in definition["spec"]["versions"] if version["name"] == "v1"
    )
    schema["properties"]["metadata"] = {}  # Kubernetes' own
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(job, schema)
    assert list(unknown_keys(schema, job)) == []


@pytest.mark.skipif(shutil.which("sky") is None, reason="SkyPilot is not installed: no sky")
def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    python = Path(shutil.which("sky") or "").resolve().with_name("python")
    environ = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_TOKEN": "t" * 32, "PYTHONPATH": ""}
    words = [str(python), "-c", LOAD, str(DEPLOY / "skypilot.yaml")]
    told = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("2 ") and "H100" in told.stdout
