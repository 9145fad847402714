"""A folder that looks like a whole model to the checks before a run: no model is in it."""

from __future__ import annotations

import json
from pathlib import Path

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
