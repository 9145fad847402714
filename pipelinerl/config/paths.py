"""Where the shipped configuration files are: inside the installed package, or next to it in a checkout."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from pipelinerl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """Return the folder of the shipped configuration files.

    Raises:
        ConfigError: neither the wheel's nor the checkout's folder is there (a broken installation).
    """
    candidates = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    for candidate in candidates:
        if (candidate / "base.yaml").is_file():
            return candidate
    raise ConfigError(
        "conf", str(candidates[0]), "the folder with base.yaml", "The installation is incomplete: install it again."
    )


def config_names(folder: Path, suffix: str = ".yaml") -> list[str]:
    """Return the names (without suffix) of the configuration files directly in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X?`, or a general hint when nothing is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Use one of these names."
