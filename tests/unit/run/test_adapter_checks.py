"""Models, devices and options of servers with which an adapter cannot be served exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.run.adapter_checks import check_adapter


def config(sync: str = "adapter", **vllm_kwargs: Any) -> RunConfig:
    lora = {"enabled": True, "sync": sync}
    content = {"output_dir": "x", "finetune": {"lora": lora}, "vllm_config": {"vllm_kwargs": vllm_kwargs}}
    return RunConfig.model_validate(content)


def model_file(folder: Path, **content: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "qwen2", "hidden_size": 8, **content}))
    return file


def test_a_dense_model_passes(tmp_path: Path) -> None:
    check_adapter(config(), True, model_file(tmp_path, num_experts=1))
    check_adapter(config(dtype="float32"), False, model_file(tmp_path))
    check_adapter(config(**{"fully-sharded-loras": ""}), True, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_experts": 8}, "merged for .*: it is a mixture of experts .num_experts=8."),
        ({"text_config": {"n_routed_experts": 64}}, "n_routed_experts=64"),
        ({"quantization_config": {"bits": 4}}, "quantized in its folder"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    file = model_file(tmp_path, **content)
    with pytest.raises(ConfigError, match=f"finetune.lora.sync: got 'adapter'.*{message}.*sync=merged"):
        check_adapter(config(), True, file)
    check_adapter(config(sync="merged"), True, file)


def test_fp32_servers_on_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm_kwargs.dtype: got 'float32', expected 16 bits"):
        check_adapter(config(dtype="float32"), True, None)


def test_an_option_about_other_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm_kwargs.max-lora-rank.*finetune.lora.sync=merged"):
        check_adapter(config(max_lora_rank=8), True, None)
    check_adapter(config(sync="merged", max_lora_rank=8), True, None)
