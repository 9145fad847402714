"""What every process of a run starts with: `run_role` is the body of each entry point. No torch.

It loads configuration, plan and identity from the run directory, starts the heartbeat and the watch on the launcher
(the process group ends when the launcher is gone), and turns errors into exit codes. Waits for nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.config import RunConfig
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, UserError
from pipelinerl.rundir.identity import read_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job, WorldMap

if TYPE_CHECKING:
    from pipelinerl.rundir.heartbeat import Heartbeat
    from pipelinerl.streams.hub import StreamHub

TOKEN_KEY = "PIPELINERL_SERVER_TOKEN"
DEATH_FD_KEY = "PIPELINERL_DEATH_FD"
#: By what the launchers of a run over several nodes know each other. No job asks another node for anything by it.
NODE_SECRET_KEY = "PIPELINERL_NODE_SECRET"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINGER_S = 10.0


@dataclass(frozen=True)
class RoleContext:
    """One process's view of the run. `token` opens the servers' routes; it is never written to disk."""

    config: RunConfig
    world: WorldMap
    job: Job
    run_dir: RunDir
    run_id: str
    incarnation: int
    token: str
    heartbeat: Heartbeat
    streams: StreamHub


def load_context(run_dir: Path | str, job_name: str, environ: Mapping[str, str] | None = None) -> RoleContext:
    """Load what the launcher wrote into `run_dir` and start this process's heartbeat.

    Raises:
        ConfigError: `run_dir` is not a started run, or has no job of that name.
    """
    from pipelinerl.config.load import load_config
    from pipelinerl.rundir.heartbeat import Heartbeat
    from pipelinerl.streams.hub import StreamHub

    env = os.environ if environ is None else environ
    files = RunDir(Path(run_dir).absolute())
    identity = read_identity(files.identity_file)
    config = load_config(files.config_file)
    world = WorldMap.from_json(files.world_file.read_bytes())
    names = [job.name for job in world.jobs]
    if job_name not in names:
        raise ConfigError("--job", job_name, f"one of {', '.join(names)}", "Use a job of this run.")
    files.job(job_name).mkdir(parents=True, exist_ok=True)
    heartbeat = Heartbeat(files.heartbeat_file(job_name), config.supervise.heartbeat_interval_s)
    return RoleContext(
        config=config,
        world=world,
        job=world.job(job_name),
        run_dir=files,
        run_id=identity.run_id,
        incarnation=identity.incarnation,
        token=env.get(TOKEN_KEY, ""),
        heartbeat=heartbeat.start(),
        streams=StreamHub(config.streams, files, identity.run_id),
    )


def run_role(main: Callable[[RoleContext], None], argv: Sequence[str] | None = None) -> int:
    """Run one role and return its exit code: 0 done, 2 user error (message only), 1 anything else (traceback).

    Under a launcher the process ends at the latest 10 s after that, even if a thread of it is still busy.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True, help="directory of the run")
    parser.add_argument("--job", required=True, help="name of the job in the run's plan")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    code = _run(main, arguments.run_dir, arguments.job)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get(DEATH_FD_KEY):
        leave = threading.Timer(_LINGER_S, os._exit, args=(code,))
        leave.daemon = True
        leave.start()
    return code


def _run(main: Callable[[RoleContext], None], run_dir: str, job_name: str) -> int:
    from pipelinerl.run.death_pipe import watch_death_pipe

    try:
        if os.environ.get(DEATH_FD_KEY):
            watch_death_pipe(int(os.environ[DEATH_FD_KEY]))
        context = load_context(run_dir, job_name)
        try:
            main(context)
        finally:
            context.heartbeat.stop()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except Exception:  # noqa: BLE001 - the last stop of every process: the whole traceback goes to its log
        traceback.print_exc()
        return EXIT_RUN_FAILED
    return 0
