"""Faults of every kind of tensor between trainer and server, with vLLM's own layers and loaders: each is found at once,
without looking at what the model computes (that is `unit/finetune/test_injected_faults`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.limits import PROCESS_LIMIT_S

TESTS = Path(__file__).parents[1]
#: Embeddings, heads, norms, queries to outputs and MLPs; routers with a bias and experts; sinks and experts in one
#: tensor; convolutions, decays and steps.
KINDS = ["qwen3", "glm4_moe", "gpt_oss", "qwen3_next", "mamba2"]
FOUND_BY = {
    "left out": "1 tensors are left out: {}",
    "ignored": "IncompleteUpdateError: the server's model ignored 1 of the tensors: {}",
    "zeroed": "(all zeros)",
    "swapped": "arrived damaged",
    "of an earlier pass": "arrived damaged",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_w1_every_fault_of_every_kind_of_tensor_is_found(family: str, tmp_path: Path) -> None:
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, str(TESTS / "fakes" / "loaded_model.py"), family, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PROCESS_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["kinds"]) >= 12
    for fault, words in FOUND_BY.items():
        found = result["found"][fault]
        assert [name for name in result["kinds"] if words.format(name) not in found.get(name, "")] == [], fault
