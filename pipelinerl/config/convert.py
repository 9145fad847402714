"""`python -m pipelinerl convert OLD.yaml`: translate a configuration file of PipelineRL once.

Prints the new file to stdout and one line to stderr about each key that was changed, dropped or cannot be translated.
Comments are lost. The exit code is 2 if something cannot be translated.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipelinerl.config.faults import nearest_key
from pipelinerl.config.former_keys import DROPPED, RENAMED, UNSUPPORTED
from pipelinerl.config.keys import is_known, known_keys, value_at
from pipelinerl.config.load import conf_dir
from pipelinerl.config.section import DOTTED
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError

_ABSENT = object()
_RL = "finetune.rl"


class Conversion:
    """One file on its way. `lines` say what happened, `failed` that something has no translation."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.lines: list[str] = []
        self.failed = False
        self._included = _included(data.get("defaults"))

    def run(self) -> dict[str, Any]:
        """The translated data."""
        for rewrite in (self._backend, self._trainer, self._algorithm, self._streams, self._wandb):
            rewrite()
        for key, new in RENAMED.items():
            self._rename(key, new)
        for key, reason in DROPPED.items():
            if self._take(key) is not _ABSENT:
                self._say("dropped", key, reason)
        for key, (harmless, reason) in UNSUPPORTED.items():
            value = self._take(key)
            if value is _ABSENT:
                continue
            if value in (harmless, None):
                self._say("dropped", key, "it asks for nothing")
            else:
                self._fail(key, f"{value!r} is not supported: {reason}")
        self._drop_foreign_keys()
        self._drop_unknown_keys()
        self.data = _with_new_references(self.data)
        return self.data

    def _backend(self) -> None:
        deepspeed, config = self._take("use_deepspeed"), self._take("deepspeed_config")
        fsdp, dtypes = self._take("use_fsdp"), self._take("fsdp")
        backend: dict[str, Any] = {}
        if fsdp is True:
            wanted = dtypes if isinstance(dtypes, dict) else {}
            backend = {"type": "fsdp", **{key: wanted[key] for key in ("param_dtype", "reduce_dtype") if key in wanted}}
        elif deepspeed is False:
            backend = {"type": "plain"}
        elif deepspeed is True or config is not _ABSENT:
            backend = {"type": "deepspeed", **({} if config in (_ABSENT, None) else {"config": config})}
        if backend:
            self._set("backend", backend)
            self._say("changed", "use_deepspeed, deepspeed_config, use_fsdp, fsdp", f"now backend: {backend}")

    def _trainer(self) -> None:
        model_class = self._take("finetune.model_class")
        if model_class not in (_ABSENT, None):
            if not str(model_class).startswith("causal-language-modeling"):
                self._fail("finetune.model_class", f"{model_class!r} is not supported: only causal language models are")
            else:
                self._say("dropped", "finetune.model_class", f"{_RL}.advantage_estimator=gae brings the value head")
        if self._take("finetune.load_as_bf16") is False:
            self._replace("finetune.load_as_bf16", "finetune.dtype", "fp32")
        if self._take("finetune.use_flash_attention") is False:
            self._replace("finetune.use_flash_attention", "finetune.attn_implementation", "segments")
        self._rename("finetune.critic_learning_rate", f"{_RL}.critic_learning_rate")
        if self._get("vllm_config.quantization") == "bf16_last_layer_fp32":
            self._take("vllm_config.quantization")
            self._replace("vllm_config.quantization=bf16_last_layer_fp32", "fp32_lm_head", True)

    def _algorithm(self) -> None:
        if self._take(f"{_RL}.use_advantages") is False:
            self._take(f"{_RL}.advantage_estimator")
            self._replace(f"{_RL}.use_advantages=false", f"{_RL}.advantage_estimator", "reinforce")
        epsilon = self._take(f"{_RL}.epsilon")
        if isinstance(epsilon, int | float):
            for name in ("epsilon_low", "epsilon_high"):
                self._replace(f"{_RL}.epsilon", f"{_RL}.{name}", epsilon)
        if self._take(f"{_RL}.group_normalization") is True:
            self._replace(f"{_RL}.group_normalization", f"{_RL}.aggregation", "group")

    def _streams(self) -> None:
        host, port = self._take("streams.host"), self._take("streams.port")
        if host not in (_ABSENT, None):
            port = 6379 if port in (_ABSENT, None) else port
            self._replace("streams.host, streams.port", "streams.url", f"redis://{host}:{port}/0")

    def _wandb(self) -> None:
        for key in ("wandb.use_wandb", "finetune.use_wandb"):
            value = self._take(key)
            if value is False:
                self._replace(key, "wandb.mode", "disabled")
            elif value is not _ABSENT:
                self._say("dropped", key, "wandb.mode says it: offline (default), online or disabled")

    def _drop_foreign_keys(self) -> None:
        """Keys of a loss, estimator, backend, ... that is not the chosen one had no effect."""
        for key in known_keys():
            if not key.chooser or self._get(key.name) is _ABSENT:
                continue
            (chooser,) = [each for each in known_keys() if each.name == key.chooser]
            chosen = self._get(key.chooser)
            if chosen is _ABSENT:
                chosen = value_at(self._included, key.chooser, _ABSENT)
            if chosen is _ABSENT:
                chosen = chooser.field.get_default()
            tag = chosen if chosen in (chooser.choice or {}) else DOTTED
            if tag not in key.owners and self._take(key.name) is not None:
                self._say("dropped", key.name, f"it has no effect with {key.chooser}={chosen}")

    def _drop_unknown_keys(self) -> None:
        names = [key.name for key in known_keys()]
        for key in [key for key in _leaves(self.data) if not is_known(key)]:
            if key.partition(".")[0] == "defaults":
                continue
            self._take(key)
            near = nearest_key(key, names)
            self._fail(
                key, "unknown key" + (f", the nearest is {near}" if near else "; your own settings go to custom")
            )

    def _rename(self, key: str, new: str) -> None:
        value = self._take(key)
        if value is not _ABSENT:
            self._replace(key, new, value)

    def _replace(self, key: str, new: str, value: Any) -> None:
        old = self._get(new)
        if isinstance(value, str) and value.startswith("${") and old is not _ABSENT:
            self._say("dropped", key, f"it is the same setting as {new}")
        elif old is _ABSENT or old == value or (isinstance(old, str) and old.startswith("${")):
            self._set(new, value)
            self._say("changed", key, f"now {new}: {value}")
        else:
            self._fail(key, f"{value!r} contradicts {new}={old!r}, which is the same setting; the latter is kept")

    def _say(self, what: str, key: str, text: str) -> None:
        self.lines.append(f"{what} {key}: {text}")

    def _fail(self, key: str, text: str) -> None:
        self.failed = True
        self._say("cannot", key, text)

    def _get(self, key: str) -> Any:
        return value_at(self.data, key, _ABSENT)

    def _set(self, key: str, value: Any) -> None:
        section = self.data
        *heads, leaf = key.split(".")
        for head in heads:
            if not isinstance(section.get(head), dict):
                section[head] = {}
            section = section[head]
        section[leaf] = value

    def _take(self, key: str) -> Any:
        """Remove a key and return its value; sections that are empty then go too."""
        value = self._get(key)
        if value is not _ABSENT:
            *heads, leaf = key.split(".")
            sections = [self.data]
            for head in heads:
                sections.append(sections[-1][head])
            del sections[-1][leaf]
            for section, head in reversed(list(zip(sections[:-1], heads, strict=True))):
                if not section[head]:
                    del section[head]
        return value


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and is_known(name):
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _included(defaults: Any) -> dict[str, Any]:
    """What the shipped files of groups that the file includes choose."""
    groups = {"backend": "deepspeed"} if isinstance(defaults, list) else {}
    for entry in defaults if isinstance(defaults, list) else []:
        for group, name in entry.items() if isinstance(entry, dict) else ():
            groups[str(group).removeprefix("override ").strip("/ ")] = str(name)
    data: dict[str, Any] = {}
    for group, name in groups.items():
        file = conf_dir() / group / f"{name}.yaml"
        if file.is_file():
            data[group] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return data


def _with_new_references(value: Any) -> Any:
    """Interpolations of renamed keys name the new ones."""
    if isinstance(value, dict):
        return {key: _with_new_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_new_references(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{([\w.]+)\}", lambda found: "${" + RENAMED.get(found[1], found[1]) + "}", value)
    return value


def main(argv: Sequence[str]) -> int:
    """Translate the file that `argv` names."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl convert", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("file", type=Path, help="a configuration file of PipelineRL")
    file = parser.parse_args(argv).file
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("file", str(file), "a YAML file that can be read", f"{error}.") from error
    if not isinstance(data, dict):
        raise ConfigError("file", str(file), "a mapping of keys to values", "Write `key: value` lines.")
    conversion = Conversion(data)
    sys.stdout.write(yaml.safe_dump(conversion.run(), sort_keys=False, allow_unicode=True))
    sys.stderr.write("".join(f"{line}\n" for line in conversion.lines))
    return EXIT_USER_ERROR if conversion.failed else 0
