"""The dtype in which servers hold their weights, known before a server answers. Called when the policy is loaded.

`vllm_config.vllm_kwargs.dtype` names it. Without the key, servers on a CPU are started in fp32; else, and with `auto`,
vLLM decides by the checkpoint, and its rules (`vllm/config/model.py`, version 0.32) are followed here: it serves no
fp32 checkpoint in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from pipelinerl.config import RunConfig

_BY_NAME = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
_IN_FILES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: vLLM refuses them in float16.
_NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
#: From this compute capability on GPUs have bf16 (Ampere).
_BF16_FROM = (8, 0)


def wire_dtype(config: RunConfig, computed: torch.dtype, device: torch.device, path: str | None = None) -> torch.dtype:
    """Dtype in which weights travel to servers, given that of the trainer's products.

    The servers' own, so that a weight is rounded once; but a trainer of bf16 products sends what it multiplies.

    Args:
        device: of the trainer; servers are taken to have the same kind.
        path: the model; default: the configuration's.
    """
    if computed != torch.float32:
        return computed
    if named := named_dtype(config.vllm_config.vllm_kwargs, torch.float32 if device.type == "cpu" else None):
        return named
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _BF16_FROM
    model = path or config.model_path
    model_config = AutoConfig.from_pretrained(model, trust_remote_code=config.finetune.trust_remote_code)
    return automatic_dtype(checkpoint_dtype(model_config, model), model_config.model_type, has_bf16)


def named_dtype(vllm_kwargs: Mapping[str, Any], default: torch.dtype | None = None) -> torch.dtype | None:
    """What the option `dtype` of the servers names, `default` without it; None: vLLM decides."""
    options = {name.strip().lstrip("-"): value for name, value in vllm_kwargs.items()}
    return _BY_NAME.get(str(options["dtype"]).strip().lower()) if "dtype" in options else default


def automatic_dtype(checkpoint: torch.dtype, model_type: str, has_bf16: bool = True) -> torch.dtype:
    """What vLLM's `auto` is for a model whose configuration or files say `checkpoint`."""
    allowed = [torch.bfloat16] if has_bf16 else []
    if model_type not in _NOT_IN_FLOAT16:
        allowed.append(torch.float16)
    # fp32 is left only to models that can be in neither.
    return checkpoint if checkpoint in allowed else (*allowed, torch.float32)[0]


def checkpoint_dtype(model_config: Any, path: str) -> torch.dtype:
    """The dtype that the configuration of a model states, else that of the tensors in its folder, else fp32."""
    nested = ("vision_config", "encoder_config")
    parts = [model_config, model_config.get_text_config(), *(getattr(model_config, name, None) for name in nested)]
    stated = next((dtype for part in parts if (dtype := getattr(part, "dtype", None)) is not None), None)
    if stated is not None:
        found = getattr(torch, stated.removeprefix("torch."), None) if isinstance(stated, str) else stated
        return found if isinstance(found, torch.dtype) else torch.float32
    return _dtype_of_files(Path(path)) or torch.float32


def _dtype_of_files(folder: Path) -> torch.dtype | None:
    """The dtype that most others fit into without loss, as vLLM counts; None without such tensors."""
    found: set[torch.dtype] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        found |= {_IN_FILES[kind] for kind in kinds if kind in _IN_FILES}
    if not found:
        return None
    ordered = sorted(found, key=str)
    return max(ordered, key=lambda dtype: sum(torch.promote_types(other, dtype) == dtype for other in ordered))
