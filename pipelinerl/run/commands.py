"""Job -> command line and environment. Pure; called by the launcher, which also saves the result as `command.sh`.

Secrets travel by environment only: they are in `child_environment`, never in argv or `command.sh`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.role import DEATH_FD_KEY, NODE_SECRET_KEY, TOKEN_KEY
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job, WorldMap

JOB_KEY = "PIPELINERL_JOB"
_ENTRYPOINTS = {
    "actor_llm": "inference.main",
    "preprocessor_llm": "inference.main",
    "actor": "actor.main",
    "preprocessor": "preprocess.main",
    "finetune": "finetune.main",
    "environment": "sandbox.environment_main",
    "verifier": "sandbox.verifier_main",
}
_USER_CODE_KINDS = ("actor", "environment", "verifier")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Command:
    """How one job is started. `env` holds what differs from the launcher's environment, without secrets."""

    job: Job
    argv: tuple[str, ...]
    env: Mapping[str, str]

    def script(self) -> str:
        """The text of `command.sh`: starts the job by hand, once the token is exported."""
        exports = [f"export {key}={shlex.quote(value)}" for key, value in self.env.items()]
        needs = f': "${{{TOKEN_KEY}:?export the token of the servers first}}"'
        return "\n".join(["#!/bin/sh", "# Starts this one job of the run by hand.", needs, *exports, ""]) + (
            f"exec {shlex.join(self.argv)}\n"
        )


def entrypoint_of(kind: str) -> str:
    """Module that a job of this kind runs."""
    return f"pipelinerl.{_ENTRYPOINTS[kind]}"


def build_command(
    job: Job,
    world: WorldMap,
    run_dir: RunDir,
    environ: Mapping[str, str],
    search_dirs: Sequence[Path] = (),
    python: str = sys.executable,
) -> Command:
    """The command of one job.

    Args:
        environ: the launcher's environment; lists such as NO_PROXY are extended, not replaced.
        search_dirs: folders with the user's own modules (for the jobs that import them).
    """
    argv = (python, "-m", entrypoint_of(job.kind), "--run-dir", str(run_dir.root), "--job", job.name)
    env = {
        JOB_KEY: job.name,
        "CUDA_VISIBLE_DEVICES": ",".join(_visible_devices(job, world)),
        "OMP_NUM_THREADS": str(job.cores),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **_no_proxy(world, environ),
    }
    if job.kind == "finetune":
        env |= _rank_variables(job, world)
    if job.kind in _USER_CODE_KINDS and search_dirs:
        paths = [str(path) for path in search_dirs] + [environ[k] for k in ("PYTHONPATH",) if environ.get(k)]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return Command(job, argv, env)


def child_environment(command: Command, environ: Mapping[str, str], token: str, death_fd: int) -> dict[str, str]:
    """The whole environment of the child, with the secrets that it needs."""
    rank_keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in environ.items() if key not in (*rank_keys, NODE_SECRET_KEY)}
    return inherited | dict(command.env) | {TOKEN_KEY: token, DEATH_FD_KEY: str(death_fd)}


def _visible_devices(job: Job, world: WorldMap) -> list[str]:
    """A trainer rank sees the GPUs of all ranks of its node, as under torchrun: its own is number LOCAL_RANK."""
    if job.kind != "finetune":
        return job.gpus
    return [gpu for rank in _ranks_of_node(job, world) for gpu in rank.gpus]


def _rank_variables(job: Job, world: WorldMap) -> dict[str, str]:
    return {
        "RANK": str(job.idx),
        "WORLD_SIZE": str(world.num_finetune_ranks),
        "LOCAL_RANK": str(job.local_idx),
        "LOCAL_WORLD_SIZE": str(len(_ranks_of_node(job, world))),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }


def _ranks_of_node(job: Job, world: WorldMap) -> list[Job]:
    return [rank for rank in world.jobs_of("finetune") if rank.node_rank == job.node_rank]


def _no_proxy(world: WorldMap, environ: Mapping[str, str]) -> dict[str, str]:
    """Calls between the processes of a run bypass an HTTP proxy."""
    known = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    entries = [entry for entry in known.split(",") if entry] + [*_LOOPBACK, *(job.host for job in world.jobs)]
    entries = list(dict.fromkeys(entries))
    value = ",".join(entries)
    return {"NO_PROXY": value, "no_proxy": value}
