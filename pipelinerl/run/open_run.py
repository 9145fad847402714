"""Opens a run that exists, for commands that look at it from another terminal: its configuration, plan and streams.

Called by the commands `audit`, `status` and `replay`. Writes nothing of the run. Waits for a Redis server if it has to
start one on the files of a run that has ended.
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
from pipelinerl.streams.hub import REDIS_URL_KEY, StreamHub
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
    """The streams of `run`, with its own Redis server up if it needs one.

    Raises:
        ConfigError: the run's own Redis server is in use and its address is in nobody's hands but the launcher's.
        StreamError: there are no streams of this run.
    """
    env = os.environ if environ is None else environ
    streams = run.config.streams
    url = env.get(REDIS_URL_KEY) or streams.url
    if streams.backend == "redis":
        from pipelinerl.run.stream_place import check_place

        # A server of the run's own that is still up has an address, too.
        if not (run.is_running and url):
            check_place(run.run_dir, url)
    if streams.backend != "redis" or url:
        yield StreamHub(streams, run.run_dir, run.identity.run_id, env)
        return
    if run.is_running:
        raise ConfigError(
            "streams.backend",
            "redis",
            f"the address of the running run's own server in {REDIS_URL_KEY}",
            "Its password is in no file. Wait for the end of the run, or use a server of your own (streams.url).",
        )
    from pipelinerl.run.redis_server import RedisServer

    with RedisServer(run.run_dir.root / "redis", streams) as server:
        yield StreamHub(streams, run.run_dir, run.identity.run_id, {**env, REDIS_URL_KEY: server.url})
