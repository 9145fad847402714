"""`python -m pipelinerl convert OLD.yaml`: translate a configuration file of PipelineRL once.

Prints the new file to stdout and one line to stderr about each key that was changed, dropped or cannot be translated.
Comments are lost. The exit code is 2 if something cannot be translated.

Files that the old one chooses from groups (`finetune: ppo`) are looked for in its folder. Where they differ from ours
of the same name, their keys are written out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelinerl.commands import typed
from pipelinerl.config.keys import value_at
from pipelinerl.config.load import conf_dir
from pipelinerl.config.translate import Conversion
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError

#: The file of each group that says least: what a file of PipelineRL writes out goes on top of it.
_NEUTRAL = {"finetune": "base", "rewards": "pure_success", "streams": "files"}
#: Groups that PipelineRL does not have, which the file that chooses the others gets.
_NEW_GROUPS = ("backend", "world")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_GLOBAL = "# @package _global_\n"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


class OldFile:
    """A file of PipelineRL in its folder.

    Attributes:
        entries: its defaults.
        root: the folder that groups are in.
        is_of_group: it has keys of the group whose folder it is in, as it does not say otherwise.
        package: the section that its keys belong to; empty: they are written from the root.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError("file", str(path), "a YAML file that can be read", f"{error}.") from error
        if not isinstance(content, dict):
            raise ConfigError("file", str(path), "a mapping of keys to values", "Write `key: value` lines.")
        header = _PACKAGE.search(text)
        self.has_header = header is not None
        self.is_of_group = header is None and path.parent.name in _NEUTRAL
        self.root = path.parent.parent if self.has_header or self.is_of_group else path.parent
        package = header[1] if header else path.parent.name if self.is_of_group else "_global_"
        self.package = "" if package == "_global_" else package.replace("_group_", path.parent.name)
        defaults: Any = content.pop("defaults", None)
        self.entries: list[Any] = defaults if isinstance(defaults, list) else []
        self.content: dict[Any, Any] = content

    def data(self, package: str | None = None) -> dict[str, Any]:
        """Its own keys from the root."""
        data: dict[str, Any] = dict(self.content)
        for part in reversed((self.package if package is None else package).split(".")):
            data = {part: data} if part else data
        return data

    def included(self, name: str) -> Path:
        """The file next to it, or from the root, that an entry of its defaults names."""
        return (self.root if name.startswith("/") else self.path.parent) / f"{name.lstrip('/')}.yaml"


class FileConversion(Conversion):
    """A file with what it includes. `entries` are the new file's defaults."""

    def __init__(self, file: OldFile, above: tuple[Path, ...] = ()) -> None:
        super().__init__({})
        self.entries: list[Any] = []
        self.file, self._above = file, (*above, file.path)
        chosen: dict[str, Any] = {}
        known: dict[str, Any] = {}
        for entry in [] if file.is_of_group else file.entries:
            if isinstance(entry, dict):
                for key, name in entry.items():
                    chosen = _merged(chosen, self._choose(str(key), name))
                    known = _merged(known, self._shipped_choice(str(key), name))
            elif entry != "_self_":
                known = _merged(known, self._include(str(entry)))
        self.inherited = known
        # A group's file is written with all of its keys, from the root: some of ours are in no group.
        self.data = _group_keys(file, file.package) if file.is_of_group else _merged(chosen, file.data())
        self._keep_clip_range()
        self.old = _merged(self.old, self.data)
        self.run()
        if any(isinstance(entry, dict) and "finetune" in entry for entry in self.entries):
            backend = self.data.get("backend", {}).get("type", "deepspeed")
            self.entries += [{group: name} for group, name in zip(_NEW_GROUPS, (backend, "auto"), strict=True)]
        if self.entries:
            self.entries.append("_self_")

    def _include(self, name: str) -> dict[str, Any]:
        """Keep the name of an included file; returns its translated keys."""
        path = self.file.included(name)
        ours = conf_dir() / path.relative_to(self.file.root)
        is_ours = ours.is_file()
        if path in self._above or not path.is_file():
            if is_ours:
                self.entries.append(name)
                return _shipped(ours)
            self.fail("defaults", f"there is no {name}.yaml, neither next to the file nor here")
            return {}
        self.entries.append(name)
        included = FileConversion(OldFile(path), self._above)
        if not is_ours and included.failed:
            reasons = (line.removeprefix("cannot ") for line in included.lines if line.startswith("cannot "))
            self.fail("defaults", f"it includes {name}.yaml, which cannot be translated: {next(reasons)}")
        elif not is_ours:
            self.say("changed", "defaults", f"translate {name}.yaml too, and put it next to this file")
        self.old = _merged(self.old, included.old)
        return _merged(dict(included.inherited), included.data)

    def _keep_clip_range(self) -> None:
        """Another loss brings another range here; in PipelineRL the one that was set before stays."""
        rl = value_at(self.data, "finetune.rl", {})
        for key in ("epsilon_low", "epsilon_high"):
            if "policy_loss" in rl and (value := value_at(self.old, f"finetune.rl.{key}")) is not None:
                rl.setdefault(key, value)

    def _choose(self, key: str, name: Any) -> dict[str, Any]:
        """Keep the choice of a group's file, or return the old keys of that file to write them out."""
        *words, target = key.split() or [""]
        group, _, package = target.lstrip("/").partition("@")
        if name is None:
            self.say("dropped", f"defaults.{group}", "it chooses nothing")
            return {}
        path = self.file.root / group / f"{name}.yaml"
        ours = conf_dir() / group / f"{name}.yaml"
        if not path.is_file():
            if ours.is_file():
                self.entries.append({key: name})
                self.say(
                    "kept", f"defaults.{group}", f"{name} is ours: there is no {group}/{name}.yaml next to the file"
                )
            else:
                self.fail("defaults", f"{group}: {name} has no file, neither next to this one nor here")
            return {}
        skipped = [path.with_name("base.yaml")] if "override" in words else []  # the file above has its keys already
        old = _group_keys(OldFile(path), package or group.replace("/", "."), skipped)
        if ours.is_file() and Conversion(old).run() == {group: _shipped(ours)}:
            self.entries.append({key: name})
            return {}
        if "override" not in words and group in _NEUTRAL:
            self.entries.append({key: _NEUTRAL[group]})
        self.say("changed", f"defaults.{group}", f"the keys of {group}/{name}.yaml are written out")
        return old

    def _shipped_choice(self, key: str, name: Any) -> dict[str, Any]:
        """The keys of our file, if the choice was kept."""
        if {key: name} not in self.entries:
            return {}
        group = key.split()[-1].lstrip("/")
        return {group: _shipped(conf_dir() / group / f"{name}.yaml")}


def _group_keys(file: OldFile, package: str, skipped: Sequence[Path] = ()) -> dict[str, Any]:
    """Old keys of a group's file and of those of the group that it includes, but for the skipped ones."""
    keys: dict[str, Any] = {}
    for entry in file.entries:
        path = file.included(str(entry))
        if isinstance(entry, str) and path not in skipped and path.is_file():
            keys = _merged(keys, _group_keys(OldFile(path), package, [*skipped, file.path]))
    return _merged(keys, file.data(None if file.has_header else package))


def _shipped(path: Path) -> dict[str, Any]:
    """Keys of a shipped file, with those of what it includes."""
    content = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(content, dict)
    keys: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            ((key, name),) = entry.items()
            group = str(key).split()[-1]
            keys = _merged(keys, {group: _shipped(conf_dir() / group / f"{name}.yaml")})
        elif entry != "_self_":
            keys = _merged(keys, _shipped(path.parent / f"{entry}.yaml"))
    return _merged(keys, {str(key): value for key, value in content.items()})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def main(argv: Sequence[str]) -> int:
    """Translate the file that `argv` names."""
    parser = argparse.ArgumentParser(prog=typed("convert"), description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a configuration file of PipelineRL")
    conversion = FileConversion(OldFile(parser.parse_args(argv).file.absolute()))
    defaults = {"defaults": conversion.entries} if conversion.entries else {}
    text = yaml.dump({**defaults, **conversion.data}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    sys.stdout.write((_GLOBAL if conversion.file.root != conversion.file.path.parent else "") + text)
    sys.stderr.write("".join(f"{line}\n" for line in conversion.lines))
    return EXIT_USER_ERROR if conversion.failed else 0
