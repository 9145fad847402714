"""Opens an existing run to read it: its configuration, placement and streams. Changes nothing in it.

For commands in another terminal, and for stages that read what another run recorded (`debug.streams_from`). May start a
server on the streams of a run that has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.errors import ConfigError
from pipelinerl.records import BatchHead
from pipelinerl.rundir.durable import is_locked
from pipelinerl.rundir.layout import RunDir, RunIdentity, read_identity
from pipelinerl.streams.base import PREPROCESSOR, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.read import read_all
from pipelinerl.world import WorldMap

_KEY = "debug.streams_from"


@dataclass(frozen=True)
class StartedRun:
    """A run directory that a launcher entered at least once."""

    run_dir: RunDir
    identity: RunIdentity
    config: RunConfig
    world: WorldMap

    def config_of(self, incarnation: int) -> RunConfig:
        """The configuration of that start; runs of older releases kept only the last one."""
        file = self.run_dir.config_of_start(incarnation)
        return load_config(file) if file.exists() else self.config

    @property
    def is_running(self) -> bool:
        """True while a launcher holds the directory."""
        return is_locked(self.run_dir.lock_file)


def find_run(folder: str | Path) -> StartedRun:
    """Load what the launcher wrote into `folder`.

    Raises:
        ConfigError: it is not the directory of a started run.
    """
    run_dir = RunDir(Path(folder).absolute())
    identity = read_identity(run_dir.identity_file)
    config = load_config(run_dir.config_file)
    try:
        world = WorldMap.from_json(run_dir.world_file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            "run directory", str(run_dir.root), f"a started run ({run_dir.world_file} is missing)", "Start it again."
        ) from error
    return StartedRun(run_dir, identity, config, world)


@contextmanager
def open_streams(run: StartedRun, environ: Mapping[str, str] | None = None) -> Iterator[StreamHub]:
    """The streams of `run`, with the server that holds them, if they need one.

    Raises:
        ConfigError: only the run's launcher can reach that server, or it is not the one that the run used.
        StreamError: the run has no streams.
    """
    streams = run.config.streams
    environ = os.environ if environ is None else environ
    with backend_of(streams).reopen(streams, run.run_dir, environ, run.is_running) as served:
        yield StreamHub(streams, run.run_dir, run.identity.run_id, served)


def recorded_streams(config: RunConfig) -> StreamHub | None:
    """The streams of another run that `debug.streams_from` names, to read only; None if it names none.

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
    return max((batch.step for batch in read_all(streams, TRAINING_DATA_TOPIC, PREPROCESSOR, BatchHead)), default=0)


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
