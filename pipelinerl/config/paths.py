"""Where the shipped configuration files are: inside the installed package, or next to it in a checkout.

Called by the composition and by whatever needs a DeepSpeed or accelerate file that the configuration names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.config.messages import did_you_mean
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


def group_file(key: str, group: str, name: str, suffix: str, search_dirs: Sequence[Path] = ()) -> Path:
    """Return the file that `key` names: a path, or the name of a file in `group` (user folders first, then ours).

    Args:
        key: dotted key, for the message, for instance `deepspeed_config`.
        group: folder of the group, for instance `deepspeed`.
        name: what the configuration says.
        suffix: `.json` or `.yaml`.
        search_dirs: folders of the user, each of which may hold the group.

    Raises:
        ConfigError: there is no such file; the message lists the names that exist.
    """
    as_path = Path(name).expanduser()
    if as_path.suffix == suffix and as_path.is_file():
        return as_path.resolve()
    folders = [folder / group for folder in (*search_dirs, conf_dir())]
    for folder in folders:
        found = folder / (name if name.endswith(suffix) else name + suffix)
        if found.is_file():
            return found.resolve()
    names = sorted({known for folder in folders for known in config_names(folder, suffix)})
    raise ConfigError(key, name, f"the path of a {suffix} file or one of {', '.join(names)}", did_you_mean(name, names))
