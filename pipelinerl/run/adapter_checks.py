"""Refuses runs whose servers could not serve the adapter that the trainer trains. Called by the launcher.

Reads the model's `config.json` only. What follows from the configuration alone is in `config.rules_adapter`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.rules_adapter import sends_adapter
from pipelinerl.config.rules_sampling import vllm_option
from pipelinerl.errors import ConfigError
from pipelinerl.inference.adapter_room import check_options_beside
from pipelinerl.inference.arguments import check_options

_MERGED = "or set finetune.lora.sync=merged"


def check_adapter(config: RunConfig, has_gpus: bool, model_file: Path | None) -> None:
    """Refuse what `finetune.lora.sync=adapter` cannot serve exactly.

    Args:
        has_gpus: the servers run on GPUs.
        model_file: the model's `config.json`, if it is on this machine.

    Raises:
        ConfigError: with key, value and way out.
    """
    if not sends_adapter(config):
        return
    check_options_beside(check_options(config.vllm_config.vllm_kwargs)[0])
    key, dtype = vllm_option(config, "dtype")
    if has_gpus and str(dtype).lower() in ("float32", "float"):
        expected = "16 bits with finetune.lora.sync=adapter: vLLM's kernels for adapters on GPUs take nothing else"
        raise ConfigError(key, dtype, expected, f"Use bfloat16, {_MERGED}.")
    model = _content(model_file)
    if "quantization_config" in model:
        raise _model_error(config, "quantized in its folder: trainer and servers would unpack it in ways of their own")
    if experts := [name for name, value in model.items() if "expert" in name and type(value) is int and value > 1]:
        raise _model_error(config, f"a mixture of experts ({experts[0]}={model[experts[0]]})")


def _content(file: Path | None) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        return {}  # who loads the model says what is wrong with it
    if not isinstance(content, dict):
        return {}
    text = content.get("text_config")
    return {**content, **text} if isinstance(text, dict) else content


def _model_error(config: RunConfig, what: str) -> ConfigError:
    return ConfigError(
        "finetune.lora.sync",
        "adapter",
        f"merged for {config.model_path}: it is {what}",
        "Set finetune.lora.sync=merged.",
    )
