"""Opens a run that exists, for commands that look at it from another terminal: its configuration, plan and streams.

Writes nothing of the run. May have to start a server on the streams of a run that has ended.
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
from pipelinerl.run.start import is_running
from pipelinerl.rundir.identity import RunIdentity, read_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.world import WorldMap


@dataclass(frozen=True)
class StartedRun:
    """A run directory that a launcher entered at least once."""

    run_dir: RunDir
    identity: RunIdentity
    config: RunConfig
    world: WorldMap

    @property
    def is_running(self) -> bool:
        """True while a launcher holds the directory."""
        return is_running(self.run_dir)


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
        ConfigError: only the run's launcher can reach that server, or it is another one than the run used.
        StreamError: there are no streams of this run.
    """
    streams = run.config.streams
    environ = os.environ if environ is None else environ
    with backend_of(streams).reopen(streams, run.run_dir, environ, run.is_running) as served:
        yield StreamHub(streams, run.run_dir, run.identity.run_id, served)
