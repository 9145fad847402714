"""From a command line to a checked configuration: Hydra composes, pydantic types, the rules compare sections.

Hydra runs as a library: its own `main` would create folders first and answer with tracebacks. The user's folder is
searched before the shipped one, so that a user's file may say `defaults: [base, _self_]` and may add files to the
groups.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pipelinerl.commands import typed
from pipelinerl.config.advice import advice
from pipelinerl.config.agent import DATA_KEYS, settle_agent
from pipelinerl.config.faults import COMMAND_LINE, faults_of, raise_faults, unknown_key
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.config.key_table import help_text
from pipelinerl.config.keys import chooser_of, is_known, schema_defaults
from pipelinerl.config.load import (
    ADAPTER_START,
    conf_dir,
    config_names,
    find_deepspeed_file,
    read_adapter,
    read_deepspeed_file,
)
from pipelinerl.config.resources import DeepSpeedSettings
from pipelinerl.config.run import RunConfig
from pipelinerl.config.secrets import refuse_secrets
from pipelinerl.config.validate import validate
from pipelinerl.errors import ConfigError, did_you_mean

#: The experiment that starts when no configuration is named.
DEFAULT_CONFIG = "math"
#: A mapping of names to weights: Hydra would merge one of the user's with that of a shipped file.
_WHOLE = "rewards.components"
_FLAGS = ("--config-name", "--config-dir", "--config-path", "--help", "--cfg", "--multirun")
_MULTIRUN = ("--multirun", "-m")
#: Characters of a member's name that may be in the name of its folder, and most of them.
_NOT_IN_FOLDERS, _MAX_FOLDER = re.compile(r"[^A-Za-z0-9=._+-]+"), 100


@dataclass(frozen=True)
class Member:
    """One run of several (`--multirun`): its folder below the common `output_dir`, which says the values that are its
    own, and its command line without the program."""

    folder: Path
    argv: tuple[str, ...]


@dataclass(frozen=True)
class ComposedConfig:
    """What a command line asks for.

    Exactly one of `config` (start a run), `members` (start each of these) and `help_text` (print it and exit 0) is set.
    `search_dirs` are folders of the user that hold code: they belong on the Python path of every process. `notes` are
    remarks for the user.
    """

    config: RunConfig | None = None
    help_text: str | None = None
    search_dirs: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    members: tuple[Member, ...] = ()


def compose(argv: Sequence[str], may_be_several: bool = False) -> ComposedConfig:
    """Compose and check the configuration that `argv` (without the program) describes, or with `--multirun`, if there
    may be several, those of its members.

    Raises:
        ConfigError: anything that the user has to change; every message has key, value, expectation and next step.
    """
    flags, overrides = _read_words(argv)
    name = DEFAULT_CONFIG if flags.config_name is None else flags.config_name.removesuffix(".yaml")
    search_dirs = [] if flags.config_dir is None else [_folder(flags.config_dir)]
    if (path := Path(name).expanduser()).is_absolute():
        search_dirs, name = list(dict.fromkeys([_folder(str(path.parent)), *search_dirs])), path.name
    if flags.help is not None:
        return ComposedConfig(help_text=help_text([*search_dirs, conf_dir()], flags.help), search_dirs=search_dirs)
    if flags.multirun and not may_be_several:
        raise ConfigError("--multirun", True, "one configuration", f"Several are for {typed('launch')} alone.")
    if flags.multirun:
        return ComposedConfig(members=_members(argv, overrides))
    composed = compose_plain(name, search_dirs, overrides)
    data = composed.data
    if flags.cfg is not None:
        return ComposedConfig(help_text=_shown(data), search_dirs=search_dirs)
    notes = list(composed.notes)
    if search_dirs and flags.config_name is None:
        notes.append(f"the experiment is {name}; for one in your folder add --config-name")
    if data.get("output_dir") in (None, "", "???"):
        words = "" if name == DEFAULT_CONFIG else f" --config-name {name}"
        next_step = f"Write for instance: {typed('launch')}{words} output_dir=results/my_run"
        raise ConfigError("output_dir", data.get("output_dir"), "the folder that the run writes to", next_step)
    settle_agent(data, search_dirs)
    refuse_secrets(data, os.environ)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise_faults(faults_of(error, data, composed.origin_of))
        raise
    config = _with_adapter(_with_deepspeed_file(config, search_dirs), composed)
    validate(config)
    return ComposedConfig(config, None, search_dirs, notes + advice(config))


def _read_words(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the overrides in their order."""
    overrides = [word for word in argv if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp")
    parser.add_argument("--help", "-h", nargs="?", const="")
    # Hydra's: there is only the job's configuration to show, and it is resolved anyway.
    parser.add_argument("--cfg", "-c", nargs="?", const="job")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(*_MULTIRUN, action="store_true")
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


def _members(argv: Sequence[str], overrides: Sequence[str]) -> tuple[Member, ...]:
    """One run for each combination of the values that `overrides` list, as Hydra forms them. All are checked."""
    sweeps = [each for each in map(_parse_override, overrides) if _is_sweep(each)]
    for sweep in sweeps:
        if not sweep.is_discrete_sweep() or sweep.key_or_group == "output_dir":
            expected = "values such as 1,2,3 or range(1,4), not of output_dir"
            raise ConfigError(sweep.key_or_group, sweep.input_line, expected, "Each run has a folder in output_dir.")
    if not sweeps:
        raise ConfigError("--multirun", True, "several values of a key, as in seed=1,2,3", "Leave the flag out.")
    swept = {sweep.input_line for sweep in sweeps}
    words = [word for word in argv if word not in swept and word not in _MULTIRUN]
    names = [str(sweep.input_line).partition("=")[0] for sweep in sweeps]
    members: dict[str, Member] = {}
    wandb_ids: set[str] = set()
    for number, values in enumerate(product(*(sweep.sweep_string_iterator() for sweep in sweeps))):
        own = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        config = compose([*words, *own]).config
        if config is None:
            raise ConfigError("--cfg", True, "one configuration to print", "Leave --multirun out, or --cfg.")
        if config.wandb.mode != "disabled" and (wandb_id := config.wandb.wandb_id):
            if wandb_id in wandb_ids:
                next_step = "Leave it out: each run has an id of its own."
                raise ConfigError("wandb.wandb_id", wandb_id, "another value for each run of --multirun", next_step)
            wandb_ids.add(wandb_id)
        folder = _NOT_IN_FOLDERS.sub("-", "_".join(word.lstrip("+") for word in own))
        if len(folder) > _MAX_FOLDER or folder in members:
            folder = f"{number}-{folder}"[:_MAX_FOLDER]
        path = Path(config.output_dir) / folder
        quoted = str(path).replace("'", r"\'")
        members[folder] = Member(path, (*words, *own, f"output_dir='{quoted}'"))
    return tuple(members.values())


def _is_sweep(override: Override) -> bool:
    """A comma asks for several runs, but separates data sets in the keys that list them."""
    return override.is_sweep_override() and override.key_or_group not in DATA_KEYS


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


def _with_adapter(config: RunConfig, composed: PlainConfig) -> RunConfig:
    """Take what the adapter that training starts from says.

    Raises:
        ConfigError: it cannot be used, or the configuration says something else: on the command line, or a value in a
            file that is not the default of its key.
    """
    lora = config.finetune.lora
    if lora.adapter_path is None:
        return config
    folder = Path(lora.adapter_path).expanduser().absolute()
    content = read_adapter(folder)
    targets = content.get("target_modules")
    taken: dict[str, Any] = {"r": content["r"], "alpha": float(content["lora_alpha"])}
    taken |= {"bias": content.get("bias", "none"), "target_modules": sorted(targets) if type(targets) is list else []}
    faults = []
    for name, value in taken.items():
        key, own = f"finetune.lora.{name}", getattr(lora, name)
        is_same = sorted(own) == value if isinstance(own, list) else own == value
        is_said = own != LoraConfig.model_fields[name].default or composed.origin_of(key) == COMMAND_LINE
        if is_said and not is_same:
            expected = f"{value}, as in {folder / 'adapter_config.json'}"
            faults.append(ConfigError(key, own, expected, "Leave the key out, or start with a new adapter."))
    raise_faults(faults)
    try:
        started = LoraConfig.model_validate(lora.model_dump() | taken | {"adapter_path": str(folder)})
    except ValidationError as error:
        expected = f"an adapter whose r, lora_alpha and bias can be trained ({error.errors()[0]['msg']})"
        next_step = "Merge it into its model, and start from that."
        raise ConfigError(ADAPTER_START, str(folder), expected, next_step) from error
    return config.model_copy(update={"finetune": config.finetune.model_copy(update={"lora": started})})


@dataclass(frozen=True)
class PlainConfig:
    """The composed data, and where it comes from."""

    data: dict[str, Any]
    override_keys: frozenset[str]
    config_file: Path
    notes: tuple[str, ...] = ()

    def origin_of(self, key: str) -> str:
        """Return the words that say where `key` was set."""
        if any(key == name or key.startswith(name + ".") for name in self.override_keys):
            return COMMAND_LINE
        return f"in {self.config_file} or a file that it includes"


def compose_plain(name: str, user_dirs: Sequence[Path] = (), words: Sequence[str] = ()) -> PlainConfig:
    """Compose the file `name` and the overrides `words`.

    Raises:
        ConfigError: no such configuration or group, an override that cannot be read, an unknown key on the command
            line, a file that is not YAML, an interpolation that cannot be resolved.
    """
    search_dirs = list(dict.fromkeys([*user_dirs, conf_dir()]))
    config_file = _config_file(name, search_dirs)
    overrides = [_parse_override(word) for word in words]
    prepared = [_prepare_override(override, search_dirs) for override in overrides]
    # Hydra looks for the named configuration in one folder only, and for what it includes also in the search path.
    first = next(folder for folder in search_dirs if config_file.is_relative_to(folder))
    others = ["'file://" + str(folder).replace("'", r"\'") + "'" for folder in search_dirs if folder != first]
    prepared.append(f"hydra.searchpath=[{','.join(others)}]")
    try:
        with initialize_config_dir(config_dir=str(first), version_base="1.3", job_name="pipelinerl"):
            composed = hydra_compose(config_name=name, overrides=prepared)
        # Defaults of the schema below the files, so that an interpolation may name any key.
        config = OmegaConf.merge(OmegaConf.create(schema_defaults()), composed)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        assert isinstance(data, dict)
        plain = {str(key): value for key, value in data.items()}
        _keep_whole(plain, config_file, overrides, user_dirs)
        return PlainConfig(
            data=plain,
            override_keys=frozenset(override.key_or_group for override in overrides),
            config_file=config_file,
            notes=_hydra_notes(overrides, config_file),
        )
    except RecursionError as error:
        loop = " includes ".join(map(str, _loop(config_file, search_dirs, ()))) or str(config_file)
        hidden = "A file of yours hides the shipped one of the same name: rename yours."
        raise ConfigError("defaults", loop, "files that do not include themselves", hidden) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # bytes that are no text, too
        raise _translate(error, config_file, search_dirs) from error


def _keep_whole(
    data: dict[str, Any], config_file: Path, overrides: Sequence[Override], user_dirs: Sequence[Path]
) -> None:
    """Of a mapping of the user's, leave no more than it says; single keys are added to what is there."""
    kept = _own_names(config_file, user_dirs, set())
    for override in overrides:
        if override.key_or_group == _WHOLE and isinstance(weights := override.value(), dict):
            kept = {str(name) for name in weights}
        elif override.key_or_group.startswith(f"{_WHOLE}.") and kept is not None:
            kept.add(override.key_or_group.removeprefix(f"{_WHOLE}."))
    weights = _components(data)
    if kept is not None and weights is not None:
        data["rewards"]["components"] = {name: weight for name, weight in weights.items() if name in kept}


def _own_names(file: Path, user_dirs: Sequence[Path], seen: set[Path]) -> set[str] | None:
    """The names of the mapping in a file of the user's, or else in the last one that it includes and that has any."""
    if file in seen or not any(file.is_relative_to(folder) for folder in user_dirs):
        return None
    seen.add(file)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    if (weights := _components(content)) is not None:
        return {str(name) for name in weights}
    files = [next(iter(_found(name, user_dirs)), file) for name in reversed(_included(content))]
    return next((names for each in files if (names := _own_names(each, user_dirs, seen)) is not None), None)


def _components(data: Mapping[str, Any]) -> dict[Any, Any] | None:
    """The mapping, if there is one; what has another type is refused by the schema."""
    rewards = data.get("rewards")
    weights = rewards.get("components") if isinstance(rewards, dict) else None
    return weights if isinstance(weights, dict) else None


def _included(content: Mapping[str, Any]) -> list[str]:
    return [entry for entry in content.get("defaults") or [] if isinstance(entry, str) and entry != "_self_"]


def _loop(file: Path, search_dirs: Sequence[Path], above: tuple[Path, ...]) -> tuple[Path, ...]:
    """The files from one that includes itself to itself again; empty: `file` leads to none."""
    if file in above:
        return (*above[above.index(file) :], file)
    names = _included(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    loops = (_loop(found, search_dirs, (*above, file)) for name in names for found in _found(name, search_dirs)[:1])
    return next(filter(None, loops), ())


def _found(name: str, folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders if (path := folder / f"{name.removesuffix('.yaml')}.yaml").is_file()]


def _hydra_notes(overrides: Sequence[Override], config_file: Path) -> tuple[str, ...]:
    """Hydra's own settings are for its `main`, which does not run here."""
    given = [override.key_or_group for override in overrides if override.key_or_group.partition(".")[0] == "hydra"]
    if "hydra" in (yaml.safe_load(config_file.read_text(encoding="utf-8")) or {}):
        given.append(f"hydra (in {config_file})")
    reason = "the run's files and logs are in output_dir, and files of yours are found by --config-dir"
    return tuple(f"{key} does nothing here: {reason}" for key in given)


def _config_file(name: str, search_dirs: Sequence[Path]) -> Path:
    for folder in search_dirs:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    names = config_names(*search_dirs)
    hint = did_you_mean(name, names)
    if len(search_dirs) == 1:
        hint += " For a file of your own add --config-dir FOLDER."
    raise ConfigError("--config-name", name, "one of " + ", ".join(names), hint)


def _parse_override(text: str) -> Override:
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except OverrideParseException as error:
        next_step = f"Quote values with special characters, as in 'key=\"a, b\"' ({str(error).splitlines()[0]})."
        raise ConfigError("override", text, "key=value, group=name, +key=value or ~key", next_step) from error


def _prepare_override(override: Override, search_dirs: Sequence[Path]) -> str:
    """Check the key of an override; `=` and `+` both set a known key, mentioned in a file or not."""
    key, text = override.key_or_group, str(override.input_line)
    if _is_sweep(override):
        next_step = f"With --multirun there is one run for each value: {typed('launch')} --multirun {text} ..."
        raise ConfigError(key, text, "one value", next_step)
    if override.is_sweep_override():
        return f"++{key}=[{text.partition('=')[2]}]"
    if key.split(".")[0] == "hydra" or override.package is not None or override.type == OverrideType.DEL:
        return text
    group = key.replace(".", "/")
    if any((folder / group).is_dir() for folder in search_dirs):
        value = override.value()
        if group == "deepspeed":  # a folder of files, not a group
            raise ConfigError(group, value, "no such key", f"Write backend=deepspeed backend.config={value}.")
        if not isinstance(value, str):
            raise ConfigError(key, value, "the name of a file in that group", f"Set single keys as {key}.KEY=VALUE.")
        has_file = any((folder / group / f"{value}.yaml").is_file() for folder in search_dirs)
        chooser = chooser_of(key)
        return text if has_file or chooser is None else f"++{chooser}={text.partition('=')[2]}"
    if not is_known(key):
        raise unknown_key(key, override.value(), COMMAND_LINE)
    return "++" + text.lstrip("+")


def _translate(error: Exception, config_file: Path, search_dirs: Sequence[Path]) -> ConfigError:
    """Turn what Hydra, OmegaConf or YAML raised into one `ConfigError`."""
    where = f"It is in {config_file}, a file that it includes, or the command line."
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(config_file)
        return ConfigError("config file", place, "YAML", f"Correct that line: {error.problem}.")
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
        names = config_names(*(folder / group for folder in search_dirs)) if name else []
        return ConfigError(
            group or "defaults", name, f"one of {', '.join(names)}", f"{did_you_mean(name, names)} {where}"
        )
    cause = f" ({error.__cause__})" if isinstance(error, ConfigCompositionException) and error.__cause__ else ""
    text = " ".join(f"{error}{cause}".split())
    key = str(getattr(error, "full_key", None) or "configuration")
    return ConfigError(key, text, "files and overrides that compose", where)
