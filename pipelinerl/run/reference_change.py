"""A run that is continued with reference servers, and was not before: batches that wait have no log-probs of them.

Called by `workspace` with the keys that changed. Reads files; waits for nothing. The other way round is no matter: the
trainer's own reference model takes the place of what servers said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import StreamError
from pipelinerl.records import SCHEMA_VERSION
from pipelinerl.run.config_changes import Change
from pipelinerl.rundir.layout import RunDir, newest_training_state
from pipelinerl.streams.base import TRAINING_DATA_TOPIC, StreamSpec
from pipelinerl.streams.file_reader import FileReader
from pipelinerl.streams.layout import list_shards, partition_dir

_BATCHES = StreamSpec(TRAINING_DATA_TOPIC, "preprocessor_0")
_PLACE_KEYS = ("finetune.rl.reference", "world.preprocessor_fraction", "world.num_preprocessor_llms")
_KL_KEYS = ("finetune.rl.kl_coef", "finetune.rl.final_kl_coef", "finetune.rl.reward_minus_kl_coef")


class _Sample(msgspec.Struct):
    ref_logprobs: list[float] = []


class _Scored(msgspec.Struct):
    sample: _Sample


class _Batch(msgspec.Struct, kw_only=True):
    """The fields of a `TrainingBatch` that are needed here."""

    step: int
    samples: list[_Scored]
    schema: int = SCHEMA_VERSION


def fix_reference(changes: Sequence[Change], old: RunConfig, new: RunConfig, run_dir: RunDir) -> list[Change]:
    """`changes`, where those that brought the reference servers must not be if batches wait without their log-probs."""
    if not _asks_servers(new) or _asks_servers(old) or not has_stage(new, "finetune"):
        return list(changes)
    if old.streams.backend != "files":
        # Records in Redis are in a server that is not up.
        why = "batches may wait in the stream that have no log-probs of reference servers"
    else:
        step = _waiting_step(run_dir)
        if step is None:
            return list(changes)
        why = f"the batch of step {step} waits in the stream, and has no log-probs of reference servers"
    keys = _PLACE_KEYS if old.finetune.rl.needs_reference else _KL_KEYS
    return [replace(change, why_fixed=why) if change.key in keys else change for change in changes]


def _asks_servers(config: RunConfig) -> bool:
    return config.finetune.rl.needs_reference and not config.uses_local_reference(config.has_reference_pool)


def _waiting_step(run_dir: RunDir) -> int | None:
    """First step behind the newest training state whose batch has no log-probs of a reference model; None: no such."""
    directory = partition_dir(run_dir.streams, _BATCHES)
    if not list_shards(directory):
        return None
    reader = FileReader[_Batch](directory, _Batch, offset=_data_offset(run_dir))
    try:
        while entries := reader.read(timeout_s=0):
            for entry in entries:
                if not any(scored.sample.ref_logprobs for scored in entry.record.samples):
                    return entry.record.step
    except StreamError:
        return None  # who reads it in the run says what is wrong with it
    finally:
        reader.close()
    return None


def _data_offset(run_dir: RunDir) -> int:
    """Where the newest training state goes on in the stream of batches."""
    step = newest_training_state(run_dir)
    if step is None:
        return 0
    try:
        manifest = json.loads((run_dir.training_state(step) / "state.json").read_text(encoding="utf-8"))
        return int(manifest["state"]["data_offset"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # the trainer says what is wrong with it; until then every batch may wait
