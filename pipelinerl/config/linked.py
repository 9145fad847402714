"""Keys that exist twice: one setting under two names, such as `attempts` and `finetune.attempts`.

Called by the composition, before validation. In the shipped files one name is an interpolation of the other, so a name
that is no interpolation any more was set on purpose.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipelinerl.config.keys import default_of
from pipelinerl.errors import ConfigError

LINKED_KEYS = (
    ("attempts", "finetune.attempts"),
    ("max_lag", "finetune.max_lag"),
    ("pop_old_data", "finetune.pop_old_data"),
    ("pop_old_data", "preprocess.pop_old_data"),
    ("force_restart", "finetune.force_restart"),
    ("fp32_lm_head", "finetune.fp32_lm_head"),
)
# In the shipped files these are interpolations of the other name.
_DERIVED = {"attempts"} | {child for root, child in LINKED_KEYS if root != "attempts"}
_ABSENT = object()


def settle_linked_keys(
    data: dict[str, Any], interpolated: Collection[str], overridden: Collection[str]
) -> dict[str, str]:
    """Give both names of each pair one value, in place.

    A command line wins over files; a value that was set wins over one that was left alone.

    Returns the names that took the value of the other one: name -> other.

    Args:
        data: the composed configuration.
        interpolated: dotted keys whose value is an interpolation.
        overridden: dotted keys on the command line.

    Raises:
        ConfigError: both names were set, to different values.
    """
    taken: dict[str, str] = {}
    for root, child in LINKED_KEYS:
        first, second = _get(data, root), _get(data, child)
        if first == second:
            continue
        if _is_set(root, first, interpolated, overridden, child):
            if _is_set(child, second, interpolated, overridden, root):
                raise ConfigError(
                    child,
                    second,
                    f"the value of {root}, which is {first!r}",
                    f"They are one setting: set {root} alone.",
                )
            _set(data, child, first)
            taken[child] = root
        else:
            _set(data, root, second)
            taken[root] = child
    return taken


def _is_set(key: str, value: Any, interpolated: Collection[str], overridden: Collection[str], other: str) -> bool:
    if key in overridden or other in overridden:
        return key in overridden
    if value is _ABSENT or key in interpolated:
        return False
    return key in _DERIVED or other in interpolated or bool(value != default_of(key))


def _get(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *heads, leaf = key.split(".")
    for part in heads:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            return
    if value is _ABSENT:
        data.pop(leaf, None)
    else:
        data[leaf] = value
