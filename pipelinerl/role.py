"""What every process of a run starts with: `run_role` is the body of each entry point. No torch.

It loads configuration, plan and identity from the run directory, starts the heartbeat, ends with the launcher, and
turns errors into exit codes.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, UserError
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.rundir.layout import RunDir, read_identity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import Job, WorldMap

logger = logging.getLogger(__name__)

JOB_KEY = "PIPELINERL_JOB"
TOKEN_KEY = "PIPELINERL_SERVER_TOKEN"
DEATH_FD_KEY = "PIPELINERL_DEATH_FD"
#: Open the Ray cluster of a run over several nodes. No job sees them.
SECRET_KEYS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINGER_S = 10.0
_DEATH_GRACE_S = 5.0
# The killer is a member of the group that ignores SIGTERM: while it lives, nobody else can get the group's id, and
# whoever ignores SIGTERM in the group ends with it. The line on stdout says that the trap is set.
_KILLER = "trap '' TERM; echo; sleep \"$1\"; kill -KILL 0"


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


def load_context(run_dir: Path | str, job_name: str) -> RoleContext:
    """Load what the launcher wrote into `run_dir` and start this process's heartbeat.

    Raises:
        ConfigError: `run_dir` is not a started run, or has no job of that name.
    """
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
        token=os.environ.get(TOKEN_KEY, ""),
        heartbeat=heartbeat.start(),
        streams=StreamHub(config.streams, files, identity.run_id),
    )


@contextmanager
def quick_imports() -> Iterator[None]:
    """Keep the garbage collector off while torch or vLLM is imported, which takes a fifth longer with it, and freeze
    what they leave, so that later collections skip it. Nothing is collected before: it takes 0.5 s and frees little."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def run_role(main: Callable[[RoleContext], None], argv: Sequence[str] | None = None) -> int:
    """Run one role and return its exit code: 0 done, 2 user error (message only), 1 anything else (traceback).

    Under a launcher the process ends at the latest 10 s later, even if one of its threads is still busy.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True, help="directory of the run")
    parser.add_argument("--job", required=True, help="name of the job in the run's plan")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    code = 0
    try:
        end_with_launcher()
        context = load_context(arguments.run_dir, arguments.job)
        try:
            main(context)
        finally:
            context.heartbeat.stop()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = EXIT_USER_ERROR
    except Exception:  # noqa: BLE001 - the last stop of every process: the whole traceback goes to its log
        traceback.print_exc()
        code = EXIT_RUN_FAILED
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get(DEATH_FD_KEY):
        leave = threading.Timer(_LINGER_S, os._exit, args=(code,))
        leave.daemon = True
        leave.start()
    return code


def end_with_launcher(grace_s: float = _DEATH_GRACE_S) -> None:
    """End this process and its children when the launcher is gone, however it went. Without a launcher, do nothing.

    The launcher holds the write end of a pipe and writes nothing; the kernel closes it when the launcher dies, even by
    SIGKILL. A daemon thread blocks in a read of the other end until then.

    Raises:
        OSError: the descriptor in the environment is not open.
    """
    if not (number := os.environ.get(DEATH_FD_KEY)):
        return
    os.fstat(int(number))
    threading.Thread(target=_await_death, args=(int(number), grace_s), name="death-pipe", daemon=True).start()


def _await_death(fd: int, grace_s: float) -> None:
    try:
        while os.read(fd, 64):
            pass
    except OSError as error:  # a pipe that cannot be read can never report the launcher's death either
        logger.error("the death pipe cannot be read: %s", error)
    logger.error("the launcher is gone: ending this process and its children")
    _end_own_group(grace_s)


def _end_own_group(grace_s: float) -> None:
    """SIGTERM this process's group, itself included, and SIGKILL what is left of it after `grace_s` seconds.

    The second signal comes from a helper process, because this one may be gone by then.
    """
    group = os.getpgrp()
    try:
        killer = subprocess.Popen(
            ["/bin/sh", "-c", _KILLER, "sh", f"{grace_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
        )
        assert killer.stdout is not None
        is_armed = killer.stdout.readline() != b""
    except OSError as error:
        logger.error("no helper to end the process group: %s", error)
        is_armed = False
    os.killpg(group, signal.SIGTERM if is_armed else signal.SIGKILL)
