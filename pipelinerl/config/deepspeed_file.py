"""Reads a DeepSpeed configuration file. Called by the composition, before anything starts, and by the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError

_KEY = "deepspeed_config"


def read_deepspeed_file(file: Path, name: str) -> dict[str, Any]:
    """Return what the file holds.

    Args:
        file: where it is.
        name: as the configuration names it, for messages.

    Raises:
        ConfigError: the file is not a JSON object with ZeRO stage 1, 2 or 3.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of the encoding
        raise ConfigError(_KEY, name, "a JSON file", f"Correct {file}: {error}.") from error
    except OSError as error:
        raise ConfigError(_KEY, name, "a file that can be read", f"Check {file}: {error.strerror}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(_KEY, name, "a file with one JSON object", f"Edit {file}.")
    zero = settings.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ConfigError(
            _KEY,
            name,
            f"a file with zero_optimization.stage 1, 2 or 3; its stage is {stage!r}",
            f"Edit {file}, or use use_deepspeed=false (every rank then holds the whole model).",
        )
    return settings
