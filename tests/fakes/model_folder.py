"""A folder that looks like a whole model to the checks before a run: no model is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: One tensor of 16 bytes: 8 bytes of length, the head, the data.
_HEAD = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})
WEIGHTS = len(_HEAD).to_bytes(8, "little") + _HEAD.encode() + bytes(16)


def save_model_folder(folder: Path) -> Path:
    """Write configuration, tokenizer and weights that hold nothing; returns `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def save_adapter_folder(folder: Path, **content: Any) -> Path:
    """Write what peft says of an adapter of rank 8, changed by `content`, and weights that hold nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 24, "bias": "none", "target_modules": ["v_proj", "q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said | content))
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return folder
