"""The configuration files: the folder of the shipped ones, the names in a folder, and DeepSpeed's JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_DEEPSPEED = "backend.config"


def conf_dir() -> Path:
    """The folder of the shipped configuration files: inside the installed package, or next to it in a checkout."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def config_names(folder: Path, suffix: str = ".yaml") -> list[str]:
    """Return the names (without suffix) of the configuration files directly in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X?`, or a general hint when nothing is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Use one of these names."


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
    expected = f"the path of a .json file or one of {', '.join(names)}"
    raise ConfigError(_DEEPSPEED, name, expected, did_you_mean(name, names))


def read_deepspeed_file(name: str, search_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """What the file that `backend.config` names holds.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object with ZeRO stage 1, 2 or 3.
    """
    file = find_deepspeed_file(name, search_dirs)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(_DEEPSPEED, name, "a readable JSON file", f"Correct {file}: {error}.") from error
    zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        expected = f"a file with zero_optimization.stage 1, 2 or 3, not {stage!r}"
        raise ConfigError(_DEEPSPEED, name, expected, f"Edit {file}, or choose backend=plain.")
    assert isinstance(settings, dict)
    return settings
