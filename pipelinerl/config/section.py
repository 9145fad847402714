"""Building blocks of the schema: sections of keys, and choices of one of several types.

A *choice* is a field that holds one of several sections, told apart by one key: `Annotated[A | B, Choice("type")]`.
Each type has its own keys and defaults, so that a key of another type cannot be set. A section with *flat* choices is
written as one mapping: `finetune.rl` has `policy_loss: gspo` and `epsilon_low: 0.001` side by side, and holds the
object `GspoLoss(epsilon_low=0.001)`. A choice may have a member for any other name with a dot, which is the dotted path
of a user's own function or class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_serializer, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

#: NumPy and vLLM accept 32 bits, and each server adds its number.
LARGEST_SEED = 2**31 - 1


class Section(BaseModel):
    """A frozen part of the configuration. Unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # A name made of digits (`wandb.wandb_name=123`) is read as a number by the command line.
        coerce_numbers_to_str=True,
    )


@dataclass(frozen=True)
class Choice:
    """Metadata of a field with several types: `key` tells them apart; the first type is the default.

    Attributes:
        key: the name of a `Literal` field of every member, but of one with a plain `str`: that of dotted paths.
        flat: the keys of the member stand among those of the section around it.
        names: of plug-ins that have no member of their own: they use that of dotted paths.
    """

    key: str
    flat: bool = False
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {tag: handler.generate_schema(member) for tag, member in self.members(source).items()}
        union = core_schema.tagged_union_schema(members, discriminator=lambda data: self.tag_of(data, source))
        return core_schema.no_info_before_validator_function(self._written_out, union)

    def members(self, source: Any) -> dict[str, type[Section]]:
        """Types by their tag. That of dotted paths is called `package.module.name`."""
        found: dict[str, type[Section]] = {}
        for member in get_args(source):
            tags = get_args(member.model_fields[self.key].annotation)
            found[tags[0] if tags else DOTTED] = member
        return found

    def tag_of(self, data: Any, source: Any) -> str:
        """The tag of what was written; anything unknown is returned as it is, for pydantic to refuse."""
        value = data.get(self.key) if isinstance(data, Mapping) else getattr(data, self.key, None)
        members = self.members(source)
        if value is None:
            return next(iter(members))
        if not isinstance(value, str):
            return repr(value)
        is_other = value not in members and (value in self.names or "." in value.strip("."))
        return DOTTED if is_other and DOTTED in members else value

    def _written_out(self, data: Any) -> Any:
        """`backend: plain` is short for `backend: {type: plain}`."""
        return {self.key: data} if isinstance(data, str) else data


#: Stands for the names of a user's own functions and classes.
DOTTED = "package.module.name"


class FlatSection(Section):
    """A section with flat choices."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        """Move the keys of each choice into its own mapping. `null` for a key of another type leaves it unset."""
        if not isinstance(data, Mapping):
            return data
        rest = dict(data)
        for name, choice, source in choices_of(cls):
            if not choice.flat or name in rest:
                continue
            members = choice.members(source)
            own = members.get(choice.tag_of(rest, source))
            gathered: dict[str, Any] = {}
            for key in dict.fromkeys(key for member in members.values() for key in member.model_fields):
                if key not in rest:
                    continue
                value = rest.pop(key)
                if value is not None or own is None or key in own.model_fields:
                    gathered[key] = value
            rest[name] = gathered
        return rest

    @model_serializer(mode="wrap")
    def _spread(self, handler: Any) -> dict[str, Any]:
        flat = {name for name, choice, _ in choices_of(type(self)) if choice.flat}
        spread: dict[str, Any] = {}
        for key, value in handler(self).items():
            spread |= value if key in flat else {key: value}
        return spread


def choice_of(field: FieldInfo) -> Choice | None:
    """The choice that a field is, if it is one."""
    return next((each for each in field.metadata if isinstance(each, Choice)), None)


def choices_of(model: type[BaseModel]) -> Iterator[tuple[str, Choice, Any]]:
    """Name, choice and union of every field of `model` that has several types."""
    for name, field in model.model_fields.items():
        choice = choice_of(field)
        if choice is not None:
            yield name, choice, field.annotation


def section_of(field: FieldInfo) -> type[Section] | None:
    """The type of a field that is a section."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None
