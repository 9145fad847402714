"""A model whose folder brings its own code: a real server runs it only with the flag that a run's setting gives it."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
from fakes.random_model import random_model, save_random_model
from fakes.updated_server import connect, probe
from fakes.vllm_process import VLLMProcess

from pipelinerl.inference.arguments import ServerSettings, server_arguments

pytestmark = pytest.mark.slow
CODE = """
    from transformers import Qwen2Config

    class OwnConfig(Qwen2Config):
        model_type = "own_qwen2"
"""


def save_model_with_code(folder: Path) -> Path:
    save_random_model(folder)
    (folder / "configuration_own.py").write_text(textwrap.dedent(CODE))
    file = folder / "config.json"
    own = {"model_type": "own_qwen2", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return folder


def test_a_server_runs_code_of_the_model_if_it_is_trusted(tmp_path: Path) -> None:
    model = save_model_with_code(tmp_path / "model")
    settings = ServerSettings(str(model), "127.0.0.1", 1, on_cpu=True, trust_remote_code=True)
    assert "--trust-remote-code" in server_arguments(settings)[0]
    environ = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    with (
        VLLMProcess(model, tmp_path / "trusted.log", {"trust-remote-code": ""}, environ=environ) as server,
        connect(server) as publisher,
    ):
        assert probe(publisher, random_model()).max_abs_diff < 1e-4
    with pytest.raises(RuntimeError, match=r"trust_remote_code|trust-remote-code"):
        VLLMProcess(model, tmp_path / "refused.log", environ=environ).__enter__()
