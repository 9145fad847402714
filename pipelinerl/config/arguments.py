"""The command line of the launcher: a few flags and any number of Hydra overrides. Called by the composition."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.config.paths import did_you_mean
from pipelinerl.errors import ConfigError

#: The experiment that starts when no configuration is named.
DEFAULT_CONFIG = "math"
_CONFIG_NAME = ("--config-name", "-cn")
_CONFIG_DIR = ("--config-dir", "-cd", "--config-path", "-cp")
_FLAGS = (*_CONFIG_NAME, *_CONFIG_DIR, "--help", "-h", "--cfg", "-c", "--resolve")


@dataclass
class Arguments:
    """What the command line says. `overrides` keeps its order; `is_named`: the configuration was chosen by name."""

    config_name: str = DEFAULT_CONFIG
    is_named: bool = False
    config_dir: Path | None = None
    help: bool = False
    help_section: str = ""
    show_config: bool = False
    overrides: list[str] = field(default_factory=list)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the arguments after `python -m pipelinerl.launch`.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or a folder that does not exist.
    """
    arguments = Arguments()
    rest = deque(word for word in argv if word)
    while rest:
        word = rest.popleft()
        flag, given, value = word.partition("=")
        if not word.startswith("-"):
            arguments.overrides.append(word)
        elif flag in ("--help", "-h"):
            arguments.help = True
            if value or (rest and "=" not in rest[0] and not rest[0].startswith("-")):
                arguments.help_section = value or rest.popleft()
        elif flag in ("--cfg", "-c"):
            arguments.show_config = True
            if rest and rest[0] in ("job", "all", "hydra"):
                rest.popleft()  # Hydra asks for one of these; there is only the job's configuration to show
        elif flag == "--resolve":
            continue  # what is shown is resolved anyway
        elif flag in _CONFIG_NAME:
            arguments.config_name = _value(flag, given, value, rest).removesuffix(".yaml")
            arguments.is_named = True
        elif flag in _CONFIG_DIR:
            arguments.config_dir = _folder(flag, _value(flag, given, value, rest))
        else:
            raise ConfigError(
                flag,
                word,
                "--config-name NAME, --config-dir DIR, --cfg, --help, or overrides such as finetune.learning_rate=1e-5",
                did_you_mean(flag, _FLAGS),
            )
    return arguments


def _value(flag: str, given: str, value: str, rest: deque[str]) -> str:
    """Return the value behind `=`, or the next word."""
    if given:
        return value
    if not rest or rest[0].startswith("-") or "=" in rest[0]:
        raise ConfigError(flag, rest[0] if rest else None, "a value", f"Write {flag}=VALUE.")
    return rest.popleft()


def _folder(flag: str, value: str) -> Path:
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            flag, value, "an existing folder with your yaml files", f"There is none at {folder.absolute()}."
        )
    return folder.resolve()
