"""The keys of `RunConfig` as dotted names."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

from pipelinerl.config.run import LIKE_TRAINING, RunConfig
from pipelinerl.config.section import DOTTED, Key, Section, choice_of, is_free, keys_of, section_of
from pipelinerl.config.task import EvaluationParameters


@cache
def known_keys() -> tuple[Key, ...]:
    """Every key that holds a value (sections left out), those of all types of a choice included."""
    return tuple(keys_of(RunConfig))


def is_known(key: str) -> bool:
    """True if the schema has this dotted key, as a section, a value, or below a mapping with free keys."""
    names = {each.name for each in known_keys()}
    free = {each.name for each in known_keys() if is_free(each.field)}
    parts = key.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    return key in names or any(name.startswith(key + ".") for name in names) or any(name in free for name in above)


def default_of(key: str) -> Any:
    """The default of a known key without conditions; a required key has none and gives None."""
    (found,) = [each for each in known_keys() if each.name == key]
    return None if found.field.is_required() else found.field.get_default(call_default_factory=True)


def values_of(key: str) -> list[str]:
    """The names that a key accepts: those of its types (dotted paths left out), or of its `Literal`."""
    (found,) = [each for each in known_keys() if each.name == key]
    names = get_args(found.field.annotation) if found.choice is None else found.choice
    return [str(name) for name in names if name != DOTTED]


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
