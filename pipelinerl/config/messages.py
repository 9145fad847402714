"""Words of the configuration's errors: the nearest known key, and pydantic's faults in plain terms.

Called by the composition. Pure: data in, `ConfigError` out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import ValidationError

from pipelinerl.config.convert import fate_of
from pipelinerl.errors import ConfigError

#: What `origin_of` says of a key that was typed.
COMMAND_LINE = "on the command line"
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X?`, or a general hint when nothing is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Use one of these names."


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key that is most like `key`, or None.

    A key at the wrong depth is found by its last part: `seq_length` -> `finetune.seq_length`.
    """
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


def unknown_key(key: str, got: object, known: Iterable[str], origin: str) -> ConfigError:
    """Return the error for a key that the schema does not have. `origin` says where it was set."""
    fate = fate_of(key)
    if fate is not None:
        next_step = f"{fate} It was set {origin}. `python -m pipelinerl convert FILE` translates a file of PipelineRL."
        return ConfigError(key, got, "a known key", next_step)
    near = nearest_key(key, known)
    next_step = f"It was set {origin}. Remove it; settings of your own task belong under `custom`."
    if near is None:
        return ConfigError(key, got, "a known key", next_step)
    return ConfigError(key, got, f"a known key (the nearest is {near})", next_step)


def faults_of(
    error: ValidationError,
    data: Mapping[str, Any],
    known: Iterable[str],
    origin_of: Callable[[str], str],
    source_of: Callable[[str], str] = str,
) -> list[ConfigError]:
    """Return one `ConfigError` for each fault that pydantic found.

    Args:
        error: what pydantic raised.
        data: the configuration that was validated.
        known: all dotted keys of the schema.
        origin_of: function from a dotted key to the words that say where it was set.
        source_of: function from a dotted key to the one whose value it has: that is the one to correct.
    """
    names = list(known)
    found: dict[str, ConfigError] = {}
    for fault in error.errors(include_url=False):
        key = source_of(_dotted(fault["loc"], data))
        if key in found:
            continue
        if (echo := _echo(key, fault["input"], found.values())) is not None:
            if origin_of(key) != COMMAND_LINE or origin_of(echo) == COMMAND_LINE:
                continue  # of two names the one that was typed is answered
            del found[echo]
        if fault["type"] == "extra_forbidden":
            found[key] = unknown_key(key, fault["input"], names, origin_of(key))
        elif fault["type"] == "missing":
            found[key] = ConfigError(key, None, "a value", f"Add {key}=... to the command line.")
        else:
            found[key] = ConfigError(key, fault["input"], _expected(fault), f"It was set {origin_of(key)}.")
    return list(found.values())


def _echo(key: str, got: object, earlier: Iterable[ConfigError]) -> str | None:
    """Return the key of an earlier fault of the same value under its other name (`attempts`, `finetune.attempts`)."""
    leaf = key.rpartition(".")[2]
    return next((fault.key for fault in earlier if fault.key.rpartition(".")[2] == leaf and fault.got == got), None)


def _dotted(loc: tuple[int | str, ...], data: Any) -> str:
    """Join the parts of `loc` up to the value (behind it pydantic names the branches of a union)."""
    parts: list[str] = []
    for part in loc:
        if isinstance(data, Mapping):
            inner = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            inner = data[part]
        else:
            break
        parts.append(str(part))
        data = inner
    return ".".join(parts)


def _expected(fault: Any) -> str:
    kind, ctx = str(fault["type"]), fault.get("ctx") or {}
    if kind == "literal_error":
        return "one of " + str(ctx["expected"]).replace(" or ", ", ")
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"{word} {ctx[name]}"
    for prefix, words in _EXPECTED.items():
        if kind.startswith(prefix):
            return words
    return str(fault["msg"])
