"""What a model can do, compared with what its servers are asked for. Called by the launcher before anything starts.

Reads the model's `config.json`; waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.rules_sampling import vllm_number, vllm_option
from pipelinerl.errors import ConfigError

LONGER_IS_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_LENGTH_KEYS = ("max_position_embeddings", "n_positions")


def check_context(config: RunConfig, config_file: Path | None, environ: Mapping[str, str]) -> None:
    """Refuse servers with a longer context than the model's: vLLM would say so when everything has started.

    Args:
        config: of the run.
        config_file: the model's `config.json`; None: it is not on this machine, and nothing is known.
        environ: vLLM's own switch for longer contexts counts.

    Raises:
        ConfigError: the context is too long; it names the key and the longest one.
    """
    asked = vllm_number(config, "max-model-len")
    key, _ = vllm_option(config, "max-model-len")
    is_changed = vllm_option(config, "hf-overrides")[1] is not None or environ.get(LONGER_IS_ALLOWED) == "1"
    if asked is None or config_file is None or is_changed:
        return
    longest = longest_context(config_file)
    if longest is None or asked <= longest:
        return
    raise ConfigError(
        key,
        asked,
        f"at most {longest}, the longest context of {config.model_path} (see its config.json)",
        f"Set {key} to {longest} or less, and llm.parameters.max_tokens to less than that. For a small model without "
        "a GPU, start your configuration from base_cpu instead of base: its sizes fit.",
    )


def longest_context(config_file: Path) -> int | None:
    """The number of positions of a model; None if it does not say, or stretches them in a way of its own."""
    try:
        model: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None  # vLLM and transformers say what is wrong with it
    text = model.get("text_config") or model
    if _is_stretched(text) or "model_max_length" in text:
        return None
    lengths = [text[name] for name in _LENGTH_KEYS if isinstance(text.get(name), int)]
    return min(lengths, default=None)


def _is_stretched(text: Mapping[str, Any]) -> bool:
    """Whether rotary positions are scaled (an old `rope_scaling`, or `rope_parameters` of a type of its own)."""
    if text.get("rope_scaling"):
        return True
    rope = text.get("rope_parameters") or {}
    return any(
        part.get("rope_type", "default") != "default" for part in (rope, *rope.values()) if isinstance(part, dict)
    )
