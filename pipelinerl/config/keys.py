"""The keys of `RunConfig` as dotted names, those of all types of a choice included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from pipelinerl.config.run import LIKE_TRAINING, RunConfig
from pipelinerl.config.section import DOTTED, Choice, Section, choice_of, section_of
from pipelinerl.config.task import EvaluationParameters


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    Attributes:
        name: dotted, as it is written.
        field: its type, default and description.
        choice: what it chooses, if it tells types apart: tag -> type.
        chooser: the key whose value decides whether this one exists; empty: it always exists.
        owners: values of `chooser` with which it exists.
        defaults: tag -> default where types differ.
    """

    name: str
    field: FieldInfo
    choice: Mapping[str, type[Section]] | None = None
    chooser: str = ""
    owners: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()


def keys_of(model: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key of `model` that holds a value, in order; those of a choice follow the key that chooses."""
    for name, field in model.model_fields.items():
        choice = choice_of(field)
        section = section_of(field)
        if choice is not None:
            yield from _keys_of_choice(choice, field, prefix if choice.flat else f"{prefix}{name}.")
        elif section is not None:
            yield from keys_of(section, f"{prefix}{name}.")
        else:
            yield Key(prefix + name, field)


def _keys_of_choice(choice: Choice, field: FieldInfo, prefix: str) -> Iterator[Key]:
    members = choice.members(field.annotation)
    first = next(iter(members.values()))
    named = {name: members[DOTTED] for name in choice.names if name not in members}
    yield Key(prefix + choice.key, first.model_fields[choice.key], {**members, **named})
    names = dict.fromkeys(key for member in members.values() for key in member.model_fields if key != choice.key)
    for name in names:
        having = {tag: member.model_fields[name] for tag, member in members.items() if name in member.model_fields}
        defaults = tuple((tag, each.get_default(call_default_factory=True)) for tag, each in having.items())
        chooser = prefix + choice.key if len(having) < len(members) else ""
        yield Key(prefix + name, next(iter(having.values())), None, chooser, tuple(having), defaults)


def is_free(field: FieldInfo) -> bool:
    """True for a mapping whose keys are the user's own."""
    options = (field.annotation, *get_args(field.annotation))
    return any(option is dict or getattr(option, "__origin__", None) is dict for option in options)


@cache
def known_keys() -> tuple[Key, ...]:
    """Every key that holds a value (sections left out)."""
    return tuple(keys_of(RunConfig))


@cache
def is_known(key: str) -> bool:
    """True if the schema has this dotted key, as a section, a value, or below a mapping with free keys."""
    names = {each.name for each in known_keys()}
    free = {each.name for each in known_keys() if is_free(each.field)}
    parts = key.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    return key in names or any(name.startswith(key + ".") for name in names) or any(name in free for name in above)


def chooser_of(section: str) -> str | None:
    """The key that chooses the type of a whole section (`streams.backend` of `streams`); None: it has one type."""
    field = RunConfig.model_fields.get(section)
    choice = None if field is None else choice_of(field)
    return None if choice is None or choice.flat else f"{section}.{choice.key}"


def key_named(name: str) -> Key:
    """A known key."""
    (found,) = [each for each in known_keys() if each.name == name]
    return found


def default_of(key: str) -> Any:
    """The default of a known key without conditions; a required key has none and gives None."""
    field = key_named(key).field
    return None if field.is_required() else field.get_default(call_default_factory=True)


def values_of(key: str) -> list[str]:
    """The names that a key accepts: those of its types (dotted paths left out), or of its `Literal`."""
    found = key_named(key)
    names = get_args(found.field.annotation) if found.choice is None else found.choice
    return [str(name) for name in names if name != DOTTED]


def value_at(data: Any, key: str, default: Any = None) -> Any:
    """What nested mappings hold at a dotted key."""
    for part in key.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return default
        data = data[part]
    return data


def schema_defaults(model: type[Section] = RunConfig) -> dict[str, Any]:
    """Defaults of all keys that exist whatever is chosen, as nested plain data; required keys are left out."""
    data: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        # A mapping with keys of the user's own would be merged with its default.
        if choice_of(field) is not None or field.is_required() or is_free(field):
            continue
        if model is EvaluationParameters and name in LIKE_TRAINING:
            data[name] = f"${{llm.parameters.{name}}}"
            continue
        data[name] = schema_defaults(section) if section else field.get_default(call_default_factory=True)
    return data
