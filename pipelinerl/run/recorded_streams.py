"""The streams of another run that stages alone read (`debug.streams_from`), read-only.

Called by the launcher, which checks them, and by the stage that reads them. Waits for nothing.
"""

from __future__ import annotations

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records import SCHEMA_VERSION
from pipelinerl.run.open_run import find_run
from pipelinerl.streams.base import PREPROCESSOR, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.read import read_all

_KEY = "debug.streams_from"


class _BatchStep(msgspec.Struct):
    """The one field of a `TrainingBatch` that is needed here."""

    step: int
    schema: int = SCHEMA_VERSION


def recorded_streams(config: RunConfig) -> StreamHub | None:
    """The streams that `debug.streams_from` names; None if it names none.

    Raises:
        ConfigError: it is not the directory of a run, or its streams are not files.
    """
    if config.debug.streams_from is None:
        return None
    run = find_run(config.debug.streams_from)
    if not backend_of(run.config.streams).is_on_disk:
        raise ConfigError(
            _KEY,
            config.debug.streams_from,
            f"a run with streams=files, it has streams={run.config.streams.backend}",
            "Record the run with streams=files.",
        )
    return StreamHub(run.config.streams, run.run_dir, run.identity.run_id)


def count_batches(streams: StreamHub) -> int:
    """Number of steps whose batches are in `streams`."""
    return max((batch.step for batch in read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, _BatchStep)), default=0)


def bounded_by_record(config: RunConfig) -> RunConfig:
    """For a trainer alone: `config` with no more steps than the other run has batches.

    Raises:
        ConfigError: it has none.
    """
    streams = recorded_streams(config)
    if config.debug.mode != "finetune" or streams is None:
        return config
    batches = count_batches(streams)
    if batches == 0:
        raise ConfigError(
            _KEY,
            config.debug.streams_from,
            "a run with batches in its stream training_data",
            "Run debug.mode=preprocessor on it first, and name that run.",
        )
    steps = min(config.finetune.max_train_steps, batches)
    return config.model_copy(update={"finetune": config.finetune.model_copy(update={"max_train_steps": steps})})
