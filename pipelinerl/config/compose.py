"""From a command line to a checked configuration: Hydra composes, pydantic types, the rules compare sections.

Called by the launcher before it writes any file. Hydra runs as a library (its own `main` would create folders first and
answer with tracebacks). Waits for nothing.
"""

from __future__ import annotations

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
from pipelinerl.config.arguments import DEFAULT_CONFIG, Arguments, parse_arguments
from pipelinerl.config.deepspeed_file import find_deepspeed_file, read_deepspeed_file
from pipelinerl.config.faults import faults_of, raise_faults
from pipelinerl.config.paths import conf_dir
from pipelinerl.config.reference import help_text
from pipelinerl.config.resources import DeepSpeedSettings
from pipelinerl.config.run import RunConfig
from pipelinerl.config.secrets import refuse_secrets
from pipelinerl.config.validate import validate
from pipelinerl.errors import ConfigError


@dataclass(frozen=True)
class ComposedConfig:
    """What a command line asks for.

    Exactly one of `config` (start a run) and `help_text` (print it and exit 0) is set. `search_dirs` are folders of the
    user that hold code: they belong on the Python path of every process. `notes` are
    remarks for the user, such as keys that do nothing here.
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
    arguments = parse_arguments(argv)
    search_dirs = [arguments.config_dir] if arguments.config_dir else []
    if arguments.help:
        text = help_text([*search_dirs, conf_dir()], arguments.help_section)
        return ComposedConfig(help_text=text, search_dirs=search_dirs)
    from pipelinerl.config.hydra_compose import compose_plain  # late: the help needs no Hydra

    composed = compose_plain(arguments)
    data = composed.data
    if arguments.show_config:
        return ComposedConfig(help_text=_shown(data), search_dirs=search_dirs)
    notes = [*composed.notes, *_default_experiment(arguments)]
    _require_output_dir(data, arguments)
    settle_agent(data, search_dirs)
    refuse_secrets(data, os.environ)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise_faults(faults_of(error, data, composed.origin_of, composed.source_of))
        raise
    config = _with_deepspeed_file(config, search_dirs)
    validate(config)
    return ComposedConfig(
        config=config,
        search_dirs=search_dirs,
        config_name=arguments.config_name,
        overrides=arguments.overrides,
        notes=notes + advice(config),
    )


def _shown(data: dict[str, Any]) -> str:
    """The configuration as YAML with every key, or as far as it was composed if it is not valid."""
    with suppress(ValidationError):
        data = RunConfig.model_validate({"output_dir": "???", **data}).model_dump()
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _default_experiment(arguments: Arguments) -> list[str]:
    """A user with a folder of configurations probably meant one of them."""
    if arguments.config_dir is None or arguments.is_named:
        return []
    return [f"no --config-name is given, so the experiment is {DEFAULT_CONFIG}; for one in your folder add its name"]


def _require_output_dir(data: dict[str, Any], arguments: Arguments) -> None:
    if data.get("output_dir") in (None, "", "???"):
        name = "" if arguments.config_name == DEFAULT_CONFIG else f" --config-name {arguments.config_name}"
        raise ConfigError(
            "output_dir",
            data.get("output_dir"),
            "the folder that the run writes to",
            f"Write for instance: python -m pipelinerl.launch{name} output_dir=results/my_run",
        )


def _with_deepspeed_file(config: RunConfig, search_dirs: Sequence[Path]) -> RunConfig:
    """Check the file that the backend names; one of the user becomes a path."""
    if not isinstance(config.backend, DeepSpeedSettings):
        return config
    read_deepspeed_file(config.backend.config, search_dirs)
    found = find_deepspeed_file(config.backend.config, search_dirs)
    if found.is_relative_to(conf_dir()):
        return config
    return config.model_copy(update={"backend": config.backend.model_copy(update={"config": str(found)})})
