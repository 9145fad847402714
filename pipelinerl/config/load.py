"""Files of configurations: the shipped ones, DeepSpeed's, and the resolved one of a run; the `cfg` that user code gets.

The launcher saves the resolved one in the run directory; every process of the run loads it. The file is plain YAML, and
what is loaded equals what was saved, odd strings (`"null"`, `"1e-3"`, `"yes"`, `"${x}"`) included.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from pipelinerl.config.faults import faults_of, raise_faults
from pipelinerl.config.former_keys import DROPPED, VALUES
from pipelinerl.config.keys import is_known, known_keys
from pipelinerl.config.run import RunConfig
from pipelinerl.config.secrets import refuse_secrets
from pipelinerl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

_PACKAGE = Path(__file__).resolve().parent.parent
_DEEPSPEED = "backend.config"
#: Key of the adapter that training starts from.
ADAPTER_START = "finetune.lora.adapter_path"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: What peft (0.18) can add to A and B, by its keys in `adapter_config.json`: merged weights and servers would lack it.
_MORE_THAN_LORA = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "target_parameters", "arrow_config"),
    *("layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
)
#: Ways to begin A and B that leave the base model's weights as they are; others (pissa, olora, ...) move a part of them
#: into the adapter, which is then none of the model that it names.
_BASE_IS_KEPT = (None, True, False, "gaussian", "eva", "orthogonal")
# YAML readers disagree about these; in quotes they are text for all of them.
_LOOKS_LIKE_A_NUMBER = re.compile(r"[-+.\d][-+.\deE_:xXoObB]*")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


class _ConfigDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes text that looks like a number, and never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _LOOKS_LIKE_A_NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ConfigDumper.add_representer(str, _represent_text)


def save_config(config: RunConfig, path: str | Path) -> Path:
    """Write the resolved configuration to `path` (atomically; folders are made) and return the path.

    Raises:
        ConfigError: a value is a secret, which is never written.
    """
    data = config.model_dump()
    refuse_secrets(data, os.environ)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.dump(data, Dumper=_ConfigDumper, sort_keys=False, width=10_000)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)
    return target


def save_composable(data: dict[str, Any], path: Path) -> Path:
    """Write plain data to `path` as a file that can be composed: text with `${` stays text; return the path."""
    path.write_text(yaml.dump(_escape(data), Dumper=_ConfigDumper, sort_keys=False, width=10_000), encoding="utf-8")
    return path


def load_config(path: str | Path) -> RunConfig:
    """Read what `save_config` wrote. Former keys without a counterpart, or that ask for nothing, are left out.

    Raises:
        ConfigError: the file is not there, is not YAML, or does not fit the schema.
    """
    source = Path(path)
    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            "config file", str(source), "the resolved configuration of a run", "Give the directory of a started run."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            "config file", str(source), "YAML text", f"The file is damaged: {error}. Start the run again."
        ) from error
    return to_run_config(_without_former_keys(data), origin=f"in {source}")


def _without_former_keys(value: Any, key: str = "") -> Any:
    """Leave out keys that have no counterpart here, and those whose value asks for nothing."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        inner = f"{key}.{name}" if key else str(name)
        asks_for_nothing = inner in DROPPED or (inner in VALUES and VALUES[inner].of(item) is None)
        if not asks_for_nothing or is_known(inner):
            kept[name] = _without_former_keys(item, inner)
    return kept


def to_run_config(data: Any, origin: str = "in code") -> RunConfig:
    """Check plain data against the schema; every fault is one line of the `ConfigError`."""
    if not isinstance(data, dict):
        raise ConfigError("config", data, "a mapping of keys to values", f"It was set {origin}.")
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise_faults(faults_of(error, data, lambda _: origin))
        raise


def to_dictconfig(config: RunConfig) -> DictConfig:
    """Return the `cfg` of user code: a resolved OmegaConf `DictConfig` with all keys.

    Keys of types that were not chosen are null.
    """
    from omegaconf import OmegaConf

    data = config.model_dump()
    for key in known_keys():
        section = data
        *heads, leaf = key.name.split(".")
        for head in heads:
            section = section[head]
        section.setdefault(leaf, None)
    created: DictConfig = OmegaConf.create(_escape(data))
    return created


def _escape(value: Any) -> Any:
    """Keep text with `${` as text: OmegaConf would resolve it again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda found: found.group(1) * 2 + r"\${", value)
    return value


def conf_dir() -> Path:
    """The folder of the shipped configuration files: inside the installed package, or next to it in a checkout."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def config_names(*folders: Path, suffix: str = ".yaml") -> list[str]:
    """Return the names (without suffix) of the configuration files directly in `folders`, sorted."""
    return sorted({path.stem for folder in folders for path in folder.glob(f"*{suffix}")})


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
    names = config_names(*folders, suffix=".json")
    expected = f"the path of a .json file or one of {', '.join(names)}"
    raise ConfigError(_DEEPSPEED, name, expected, did_you_mean(name, names))


def read_adapter(folder: Path) -> dict[str, Any]:
    """What `adapter_config.json` of a PEFT adapter says.

    Raises:
        ConfigError: `folder` holds no LoRA adapter whose weights are A and B in safetensors.
    """
    key, name = ADAPTER_START, str(folder)
    file, weights = folder / "adapter_config.json", folder / ADAPTER_WEIGHTS
    if missing := [each for each in (file, weights) if not each.is_file()]:
        expected = f"a folder with a PEFT adapter; {missing[0]} is missing"
        raise ConfigError(key, name, expected, "Give the folder that save_pretrained of peft wrote.")
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(key, name, "a readable adapter_config.json", f"Copy {file} again: {error}.") from error
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if kind != "LORA" or type(content.get("r")) is not int or not isinstance(content.get("lora_alpha"), int | float):
        expected = f"peft_type LORA with r and lora_alpha in {file}, not {kind!r}"
        raise ConfigError(key, name, expected, "Merge it into its model, and start from that.")
    if more := [each for each in _MORE_THAN_LORA if content.get(each)]:
        expected = f"A and B only; {file} has {', '.join(more)}"
        raise ConfigError(key, name, expected, "Merge it into its model, and start from that.")
    assert isinstance(content, dict)
    if (begun := content.get("init_lora_weights")) not in _BASE_IS_KEPT:
        expected = f"an adapter of unchanged base weights; {file} has init_lora_weights {begun!r}"
        raise ConfigError(key, name, expected, "Merge it into its model, and start from that.")
    return content


def merge_command(model: str, adapter: str) -> str:
    """What to type to make one model of a model and an adapter of it, in the folder `merged`."""
    code = (
        "from peft import PeftModel; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"PeftModel.from_pretrained(M.from_pretrained({model!r}, dtype='auto'), {adapter!r})"
        f".merge_and_unload().save_pretrained('merged'); T.from_pretrained({model!r}).save_pretrained('merged')"
    )
    return f'python -c "{code}"'


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
