"""From a command line to a checked configuration: Hydra composes, pydantic types, the rules compare sections.

Hydra runs as a library: its own `main` would create folders first and answer with tracebacks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipelinerl.config.advice import advice
from pipelinerl.config.agent import settle_agent
from pipelinerl.config.conf_files import conf_dir, did_you_mean, find_deepspeed_file, read_deepspeed_file
from pipelinerl.config.faults import faults_of, raise_faults
from pipelinerl.config.key_table import help_text
from pipelinerl.config.resources import DeepSpeedSettings
from pipelinerl.config.run import RunConfig
from pipelinerl.config.secrets import refuse_secrets
from pipelinerl.config.validate import validate
from pipelinerl.errors import ConfigError

#: The experiment that starts when no configuration is named.
DEFAULT_CONFIG = "math"
_FLAGS = ("--config-name", "--config-dir", "--config-path", "--help", "--cfg")


@dataclass(frozen=True)
class ComposedConfig:
    """What a command line asks for.

    Exactly one of `config` (start a run) and `help_text` (print it and exit 0) is set. `search_dirs` are folders of the
    user that hold code: they belong on the Python path of every process. `notes` are remarks for the user.
    """

    config: RunConfig | None = None
    help_text: str | None = None
    search_dirs: list[Path] = field(default_factory=list)
    config_name: str = ""
    overrides: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compose(argv: Sequence[str]) -> ComposedConfig:
    """Compose and check the configuration that `argv` (without the program) describes.

    Raises:
        ConfigError: anything that the user has to change; every message has key, value, expectation and next step.
    """
    flags, overrides = _parse(argv)
    name = DEFAULT_CONFIG if flags.config_name is None else flags.config_name.removesuffix(".yaml")
    search_dirs = [] if flags.config_dir is None else [_folder(flags.config_dir)]
    if (path := Path(name).expanduser()).is_absolute():
        search_dirs, name = list(dict.fromkeys([_folder(str(path.parent)), *search_dirs])), path.name
    if flags.help is not None:
        return ComposedConfig(help_text=help_text([*search_dirs, conf_dir()], flags.help), search_dirs=search_dirs)
    from pipelinerl.config.hydra_compose import compose_plain  # late: the help needs no Hydra

    composed = compose_plain(name, search_dirs, overrides)
    data = composed.data
    if flags.cfg is not None:
        return ComposedConfig(help_text=_shown(data), search_dirs=search_dirs)
    notes = list(composed.notes)
    if search_dirs and flags.config_name is None:
        notes.append(f"the experiment is {name}; for one in your folder add --config-name")
    if data.get("output_dir") in (None, "", "???"):
        words = "" if name == DEFAULT_CONFIG else f" --config-name {name}"
        next_step = f"Write for instance: python -m pipelinerl.launch{words} output_dir=results/my_run"
        raise ConfigError("output_dir", data.get("output_dir"), "the folder that the run writes to", next_step)
    settle_agent(data, search_dirs)
    refuse_secrets(data, os.environ)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise_faults(faults_of(error, data, composed.origin_of))
        raise
    config = _with_deepspeed_file(config, search_dirs)
    validate(config)
    return ComposedConfig(config, None, search_dirs, name, overrides, notes + advice(config))


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the overrides in their order."""
    overrides = [word for word in argv if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp")
    parser.add_argument("--help", "-h", nargs="?", const="")
    # Hydra's: there is only the job's configuration to show, and it is resolved anyway.
    parser.add_argument("--cfg", "-c", nargs="?", const="job")
    parser.add_argument("--resolve", action="store_true")
    try:
        flags, rest = parser.parse_known_args([word for word in argv if word and word not in overrides])
    except argparse.ArgumentError as error:
        flag = str(error.argument_name).partition("/")[0]
        raise ConfigError(flag, None, "a value", f"Write {flag}=VALUE ({error.message}).") from error
    for word in rest:
        if word.startswith("-"):
            hint = did_you_mean(word.partition("=")[0], _FLAGS)
            raise ConfigError(word, word, "a flag of --help, or overrides such as finetune.learning_rate=1e-5", hint)
    return flags, [*overrides, *rest]


def _folder(value: str) -> Path:
    folder = Path(value).expanduser()
    if not folder.is_dir():
        next_step = f"There is none at {folder.absolute()}."
        raise ConfigError("--config-dir", value, "an existing folder with your yaml files", next_step)
    return folder.resolve()


def _shown(data: dict[str, Any]) -> str:
    """The configuration as YAML with every key, or as far as it was composed if it is not valid."""
    with suppress(ValidationError):
        data = RunConfig.model_validate({"output_dir": "???", **data}).model_dump()
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _with_deepspeed_file(config: RunConfig, search_dirs: Sequence[Path]) -> RunConfig:
    """Check the file that the backend names; one of the user becomes a path."""
    if not isinstance(config.backend, DeepSpeedSettings):
        return config
    read_deepspeed_file(config.backend.config, search_dirs)
    found = find_deepspeed_file(config.backend.config, search_dirs)
    if found.is_relative_to(conf_dir()):
        return config
    return config.model_copy(update={"backend": config.backend.model_copy(update={"config": str(found)})})
