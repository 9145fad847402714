"""What differs between the configuration of a run and the one it is continued with. Pure; called by `workspace`.

Most keys may change between two starts of a run. Those in `FIXED` may not: what is on disk (training state, streams,
the order of problems) was made with the old value and would be read as if it had been made with the new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError

NOT_COMPARED = ("output_dir", "force_restart", "dry_run", "finetune.force_restart")
FIXED = {
    "model_path": "the training state is of that model",
    "seed": "the order of problems follows from it",
    "finetune.seed": "it belongs to the training state",
    "finetune.model_class": "the training state has those parameters",
    "finetune.lora": "the training state has those parameters",
    "finetune.optim": "the training state is of that optimizer",
    "streams.backend": "the records of the run are there",
    "streams.url": "the records of the run are there",
    "dataset_loader": "the order of problems refers to its problems",
    "dataset_loader_params": "the order of problems refers to its problems",
    "train_dataset_names": "the order of problems refers to its problems",
    "train_subset": "the order of problems refers to its problems",
    "use_deepspeed": "the training state is in that backend's format",
    "deepspeed_config": "the training state is in that backend's format",
    "use_fsdp": "the training state is in that backend's format",
    "debug.mode": "the streams are those of its stages",
    "debug.streams_from": "the records are those of that run",
}


@dataclass(frozen=True)
class Change:
    """One key that differs; `why_fixed` says why it must not, if so."""

    key: str
    old: Any
    new: Any
    why_fixed: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def find_changes(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every key whose value differs, in the order of the schema."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [
        Change(key, before.get(key), after.get(key), _why_fixed(key, old)) for key in keys if not _is(key, NOT_COMPARED)
    ]


def refuse_fixed(changes: list[Change], root: str) -> None:
    """Raise ConfigError if one of `changes` must not be; it names all of those."""
    bad = [change for change in changes if change.why_fixed]
    if not bad:
        return
    first = bad[0]
    others = f" Also changed and fixed: {'; '.join(map(str, bad[1:]))}." if bad[1:] else ""
    raise ConfigError(
        first.key,
        first.new,
        f"{first.old!r}, as {root} was started with ({first.why_fixed})",
        f"A run is continued with that value.{others} Set it back, choose another output_dir, or set "
        "force_restart=true to move the old content aside and start anew.",
    )


def _why_fixed(key: str, old: RunConfig) -> str | None:
    if key == "deepspeed_config" and not old.use_deepspeed:
        return None
    if key == "finetune.lora.sync":
        return None  # what updates send is not in the training state
    return next((why for fixed, why in FIXED.items() if _is(key, (fixed,))), None)


def _is(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
