"""Faults of a configuration as `ConfigError`: the nearest known key, and pydantic's faults in plain terms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from pydantic import BaseModel, ValidationError

from pipelinerl.commands import typed
from pipelinerl.config.former_keys import fate_of, synonym_of
from pipelinerl.config.keys import Key, known_keys, value_at
from pipelinerl.config.run import LIKE_TRAINING, RunConfig
from pipelinerl.config.section import DOTTED, choice_of, section_of
from pipelinerl.errors import ConfigError, did_you_mean

#: What `origin_of` says of a key that was typed.
COMMAND_LINE = "on the command line"


class ConfigFaults(ConfigError):
    """Several faults of one configuration, one line each. `faults` holds them; the first gives `key` and `got`."""

    def __init__(self, faults: list[ConfigError]) -> None:
        self.faults = faults
        first = faults[0]
        super().__init__(first.key, first.got, first.expected, first.next_step)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)

    def __reduce__(self) -> Any:
        return type(self), (self.faults,)


def raise_faults(faults: list[ConfigError]) -> None:
    """Raise nothing, the one fault, or all of them as one error."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ConfigFaults(faults)


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key that is meant by `key` in another library, or else most like it, or None.

    A key at the wrong depth is found by its last part: `seq_length` -> `finetune.seq_length`.
    """
    if (synonym := synonym_of(key)) is not None:
        return synonym
    head, _, leaf = key.rpartition(".")
    best, best_score = None, 0.0
    for candidate in known:
        candidate_head, _, candidate_leaf = candidate.rpartition(".")
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, leaf, candidate_leaf).ratio()
        score = max(whole, last * (1.0 if head == candidate_head else 0.9))
        if score > best_score:
            best, best_score = candidate, score
    return best if best_score >= 0.6 else None


def unknown_key(key: str, got: object, origin: str) -> ConfigError:
    """Return the error for a key that the schema does not have. `origin` says where it was set."""
    fate = fate_of(key, got)
    if fate is not None:
        next_step = f"{fate} It was set {origin}. `{typed('convert')} FILE` translates a file of PipelineRL."
        return ConfigError(key, got, "a known key", next_step)
    near = nearest_key(key, [each.name for each in known_keys()])
    next_step = f"It was set {origin}. Remove it; settings of your own task belong under `custom`."
    if near is None:
        return ConfigError(key, got, "a known key", next_step)
    return ConfigError(key, got, f"a known key (the nearest is {near})", next_step)


def faults_of(
    error: ValidationError,
    data: Mapping[str, Any],
    origin_of: Callable[[str], str],
) -> list[ConfigError]:
    """Return one `ConfigError` for each fault that pydantic found.

    Args:
        error: what pydantic raised.
        data: the configuration that was validated.
        origin_of: function from a dotted key to the words that say where it was set.
    """
    found: dict[str, ConfigError] = {}
    for fault in error.errors(include_url=False):
        place = _place_of(fault["loc"], data)
        key = place.key
        if key in found:
            if fault["type"] == "literal_error":  # another branch of the same union
                first = found[key]
                found[key] = ConfigError(key, first.got, f"{first.expected}, or {_expected(fault)}", first.next_step)
            continue
        origin = f"It was set {origin_of(key)}."
        if fault["type"] == "extra_forbidden":
            owners = [each for each in known_keys() if each.name == key and each.chooser]
            if owners:
                found[key] = _foreign_key(owners[0], fault["input"], place.chosen, origin)
            else:
                found[key] = unknown_key(key, fault["input"], origin_of(key))
        elif fault["type"] == "missing":
            found[key] = ConfigError(key, None, "a value", f"Add {key}=... to the command line.")
        elif fault["type"].startswith("union_tag"):
            tags = list(place.tags)
            got = (fault.get("ctx") or {}).get("tag")
            found[key] = ConfigError(key, got, "one of " + ", ".join(tags), f"{did_you_mean(str(got), tags)} {origin}")
        else:
            found[key] = ConfigError(key, fault["input"], _expected(fault), origin)
    for name in LIKE_TRAINING:  # evaluation follows, with the same fault
        if f"llm.parameters.{name}" in found:
            found.pop(f"test_llm.parameters.{name}", None)
    return list(found.values())


def _foreign_key(key: Key, got: object, chosen: str, origin: str) -> ConfigError:
    """A key that another type of the same choice has."""
    owners = " or ".join([", ".join(key.owners[:-1]), key.owners[-1]] if len(key.owners) > 1 else key.owners)
    expected = f"no such key with {key.chooser}={chosen}; it belongs to {owners}"
    return ConfigError(key.name, got, expected, f"Remove it (or set it to null), or change {key.chooser}. {origin}")


@dataclass(frozen=True)
class _Place:
    key: str
    chosen: str = ""
    tags: Collection[str] = ()


def _place_of(loc: tuple[int | str, ...], data: Any) -> _Place:
    """The dotted key that pydantic's `loc` stands for, and the choice around it.

    `loc` has names of fields that hold a choice and of the types in it, which are not part of the key, and after a
    value the branches of its union.
    """
    model: type[BaseModel] | None = RunConfig
    parts: list[str] = []
    chosen, tags = "", ()
    rest = list(loc)
    while rest and model is not None:
        part = str(rest.pop(0))
        field = model.model_fields.get(part)
        choice = None if field is None else choice_of(field)
        if field is not None and choice is not None:
            members = choice.members(field.annotation)
            if not choice.flat:
                parts.append(part)
            if not rest:
                return _Place(".".join([*parts, choice.key]), tags=dict.fromkeys((*choice.names, *members)))
            tag = str(rest.pop(0))
            model = members.get(tag)
            chosen = tag if tag != DOTTED else str(value_at(data, ".".join([*parts, choice.key]), tag))
            continue
        parts.append(part)
        model = None if field is None else section_of(field)
    value: Any = data
    for name in parts:
        value = value.get(name) if isinstance(value, Mapping) else None
    for index in rest:
        if isinstance(value, Mapping):
            value = value.get(index)
        elif isinstance(value, list) and isinstance(index, int) and index < len(value):
            value = value[index]
        else:
            break
        parts.append(str(index))
    return _Place(".".join(parts), chosen, tags)


def _expected(fault: Any) -> str:
    if str(fault["type"]).startswith(("model", "dict")):
        return "a mapping of keys to values"
    if fault["type"] == "string_too_short":
        return "text that is not empty"
    expected = str(fault["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    return expected.partition(", unable to ")[0]
