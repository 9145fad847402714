"""The keys of the schema as dotted names. Called by the composition, the documentation and the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelinerl.config.run import RunConfig


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _is_free(field: FieldInfo) -> bool:
    """True for a mapping whose keys are the user's own."""
    options = (field.annotation, *get_args(field.annotation))
    return any(option is dict or getattr(option, "__origin__", None) is dict for option in options)


def fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its field, depth first, sections before their keys."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = _section(field)
        if section is not None:
            yield from fields(section, f"{prefix}{name}.")


def known_keys() -> list[str]:
    """Return every dotted key of the schema that holds a value (sections left out)."""
    return [key for key, field in fields() if _section(field) is None]


def is_known(key: str) -> bool:
    """True if the schema has this dotted key, as a section, a value, or below a mapping with free keys."""
    model: type[BaseModel] = RunConfig
    for part in key.split("."):
        field = model.model_fields.get(part)
        if field is None:
            return False
        if _is_free(field):
            return True
        section = _section(field)
        if section is None:
            return key.endswith(part)
        model = section
    return True


def default_of(key: str) -> Any:
    """Return the schema's default of a known key; a required key has none and gives None."""
    value: Any = None
    model: type[BaseModel] = RunConfig
    for part in key.split("."):
        field = model.model_fields[part]
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        section = _section(field)
        if section is not None:
            model = section
    return value
