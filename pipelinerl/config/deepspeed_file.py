"""The DeepSpeed configuration file that `backend.config` names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.paths import conf_dir, config_names, did_you_mean
from pipelinerl.errors import ConfigError

_KEY = "backend.config"


def find_deepspeed_file(name: str, search_dirs: Sequence[Path] = ()) -> Path:
    """The file that `backend.config` names: a path, or one in a folder `deepspeed` (the user's first, then ours).

    Raises:
        ConfigError: there is none; the message lists the names that exist.
    """
    as_path = Path(name).expanduser()
    if as_path.suffix == ".json" and as_path.is_file():
        return as_path.resolve()
    folders = [folder / "deepspeed" for folder in (*search_dirs, conf_dir())]
    for folder in folders:
        found = folder / f"{name.removesuffix('.json')}.json"
        if found.is_file():
            return found.resolve()
    names = sorted({known for folder in folders for known in config_names(folder, ".json")})
    raise ConfigError(_KEY, name, f"the path of a .json file or one of {', '.join(names)}", did_you_mean(name, names))


def read_deepspeed_file(name: str, search_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """What the file that `backend.config` names holds.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object with ZeRO stage 1, 2 or 3.
    """
    file = find_deepspeed_file(name, search_dirs)
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
            f"Edit {file}, or choose backend=plain (every rank then holds the whole model).",
        )
    return settings
