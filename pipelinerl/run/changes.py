"""What differs between the config that a run was started with and the one that it is continued with.

Most keys may change between two starts of a run. Those in `FIXED` may not: what is on disk (training state, streams,
the order of problems) was made with the old value and would be read as if it had been made with the new one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records import StepDone, TrainerMessage
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import TRAINER, TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.read import read_all

NOT_COMPARED = ("output_dir", "force_restart", "dry_run")
_PROBLEMS = "the order of problems refers to its problems"
_PARAMETERS = "the training state has those parameters"
_BACKEND = "the training state is in that backend's format"
_RECORDS = "the records of the run are there"
FIXED = {
    "model_path": "the training state is of that model",
    "seed": "the order of problems follows from it",
    "finetune.lora": _PARAMETERS,
    "streams.backend": _RECORDS,
    "streams.url": _RECORDS,
    "dataset_loader": _PROBLEMS,
    "dataset_loader_params": _PROBLEMS,
    "train_dataset_names": _PROBLEMS,
    "train_subset": _PROBLEMS,
    "backend.type": _BACKEND,
    "backend.config": _BACKEND,
    "debug.mode": "the streams are those of its stages",
    "debug.streams_from": "the records are those of that run",
}
#: These do not belong to the training state.
_FREE = ("finetune.lora.sync",)
#: Keys that bring in reference servers, with a reference model before and without one.
_PLACE_KEYS = ("finetune.rl.reference", "world.preprocessor_fraction", "world.num_preprocessor_llms")
_KL_KEYS = ("finetune.rl.kl_coef", "finetune.rl.final_kl_coef", "finetune.rl.reward_minus_kl_coef")


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
    fixed = {**FIXED, **_reference_keys(old, new)}
    if old.finetune.rl.uses_values != new.finetune.rl.uses_values:
        fixed["finetune.rl.advantage_estimator"] = _PARAMETERS
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and not _is(key, NOT_COMPARED)]
    return [Change(key, before.get(key), after.get(key), _why_fixed(key, fixed)) for key in keys]


def refuse_fixed(changes: Sequence[Change], root: Path) -> None:
    """Raise ConfigError if one of `changes` must not be; it names all of those."""
    first, *others = [change for change in changes if change.why_fixed]
    also = f" Also changed and fixed: {'; '.join(map(str, others))}." if others else ""
    raise ConfigError(
        first.key,
        first.new,
        f"{first.old!r}, as {root} was started with ({first.why_fixed})",
        f"A run is continued with that value.{also} Set it back, choose another output_dir, or set "
        "force_restart=true to move the old run aside.",
    )


def has_trained(run_dir: RunDir, config: RunConfig) -> bool:
    """False if the run in `run_dir` has certainly not taken an optimizer step.

    Args:
        run_dir: of a run that is not running.
        config: that it was started with. A stage without a trainer (`debug.mode`) always counts as trained: its records
            are its result.
    """
    # Hidden files are what ranks tell each other when they start.
    folder = run_dir.finetune
    has_weights = folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir())
    if not has_stage(config, "finetune") or has_weights:
        return True
    try:
        steps = json.loads(run_dir.summary_file.read_text(encoding="utf-8")).get("steps")
    except (OSError, ValueError, AttributeError):
        steps = None  # the previous start did not come to count them
    if steps or not backend_of(config.streams).is_on_disk:
        return bool(steps != 0)  # the records are in a server that is not up: only the summary knows
    return _has_step(StreamHub(config.streams, run_dir))


def _has_step(streams: StreamHub) -> bool:
    try:
        return any(isinstance(record, StepDone) for record in read_all(streams, TRAINER_TOPIC, TRAINER, TrainerMessage))
    except StreamError:
        return True  # who knows what was there


def _reference_keys(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """Keys that must not change because they would bring in reference servers: batches that wait in the stream have no
    log-probs of them. (The other way round the trainer's own reference model takes their place.)"""
    if not _asks_servers(new) or _asks_servers(old) or not has_stage(new, "finetune"):
        return {}
    keys = _PLACE_KEYS if old.finetune.rl.needs_reference else _KL_KEYS
    return dict.fromkeys(keys, "batches that wait in the stream have no log-probs of reference servers")


def _asks_servers(config: RunConfig) -> bool:
    return config.finetune.rl.needs_reference and not config.uses_local_reference(config.has_reference_pool)


def _why_fixed(key: str, fixed: dict[str, str]) -> str | None:
    return None if _is(key, _FREE) else next((why for name, why in fixed.items() if _is(key, (name,))), None)


def _is(key: str, names: Sequence[str]) -> bool:
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
