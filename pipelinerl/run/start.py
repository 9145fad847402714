"""How a run starts: its directory (new, continued, moved aside or refused), commands and environment of its jobs.

`inspect` only looks, so that a refusal leaves everything as it was; `enter` writes. A lock, held for the life of the
launcher, keeps a second one out.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.errors import ConfigError
from pipelinerl.role import DEATH_FD_KEY, NODE_SECRET_KEY, TOKEN_KEY
from pipelinerl.run.changes import Change, find_changes, has_trained, refuse_fixed
from pipelinerl.rundir.durable import FileLock, is_locked
from pipelinerl.rundir.identity import RunIdentity, read_identity, write_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Job, WorldMap

JOB_KEY = "PIPELINERL_JOB"
#: Where vLLM creates its sockets.
SOCKET_FOLDER_KEY = "VLLM_RPC_BASE_PATH"
# Limit of a Unix socket's path on Linux (`sun_path` with its terminator), and the name of one of vLLM's.
_LONGEST_SOCKET, _SOCKET_NAME = 107, len("/00000000-0000-0000-0000-000000000000")
_ENTRYPOINTS = {
    "actor_llm": "inference.main",
    "preprocessor_llm": "inference.main",
    "actor": "actor.main",
    "preprocessor": "preprocess.main",
    "finetune": "finetune.main",
    "environment": "sandbox.main",
    "verifier": "sandbox.main",
}
_USER_CODE_KINDS = ("actor", "environment", "verifier")
_RANK_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CHOOSE = "Choose another output_dir, or set force_restart=true to move the old content aside and start over."


@dataclass(frozen=True)
class Decision:
    """What to do with the directory. `identity` is the one that this start will have; `changes` are the config keys
    that differ from those of the previous start."""

    kind: Literal["new", "continue", "move_aside"]
    run_dir: RunDir
    identity: RunIdentity
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class EnteredRun:
    """A run directory that this launcher holds. `moved_to`: where the run is that was there before."""

    run_dir: RunDir
    identity: RunIdentity
    changes: tuple[Change, ...]
    moved_to: Path | None


def inspect(config: RunConfig, run_id: str | None = None) -> Decision:
    """Decide without writing anything.

    A run that ended early is continued from its newest checkpoint, or from the start if it has none yet; a complete one
    if there are more steps to train now. One that never trained a step is moved aside if a value is corrected that must
    not change later: a new run begins.

    Args:
        config: of this start.
        run_id: of a new run; None: the name of the directory and a random number.

    Raises:
        ConfigError: the directory cannot be used: another launcher runs in it, it holds another run or a finished one,
            or the run in it was started with a value that must not change.
    """
    run_dir = RunDir(Path(config.output_dir).absolute())
    fresh = RunIdentity(run_id=run_id or f"{run_dir.root.name}-{secrets.token_hex(4)}", incarnation=0)
    with _usable(run_dir.root):
        _refuse_unwritable(run_dir.root)
        if not _holds_a_run(run_dir):
            return Decision("new", run_dir, fresh)
        if is_locked(run_dir.lock_file):
            raise _in_use(run_dir)
        if config.force_restart:
            return Decision("move_aside", run_dir, fresh)
        if not run_dir.identity_file.exists():
            expected = "a new directory or a run of pipelinerl; it holds streams or weights"
            raise ConfigError("output_dir", str(run_dir.root), expected, _CHOOSE)
        old = read_identity(run_dir.identity_file)
        # Without a config the previous start ended before it came to anything.
        started = load_config(run_dir.config_file) if run_dir.config_file.exists() else None
        _refuse_finished(run_dir, old, started, config)
        changes = () if started is None else tuple(find_changes(started, config))
        if started is not None and any(change.why_fixed for change in changes):
            if not has_trained(run_dir, started):
                return Decision("move_aside", run_dir, fresh, changes)
            refuse_fixed(changes, run_dir.root)
        identity = RunIdentity(run_id=old.run_id, incarnation=old.incarnation + 1)
        return Decision("continue", run_dir, identity, changes)


@contextmanager
def enter(config: RunConfig, run_id: str | None = None) -> Iterator[EnteredRun]:
    """Take the directory as `inspect` decides: move the old run aside or create the directory, lock it, write the
    identity. Leaving lets another launcher in.

    Raises:
        ConfigError: as `inspect`; or the system refuses it, or another launcher was quicker.
    """
    decision = inspect(config, run_id)
    run_dir, moved_to, lock = decision.run_dir, None, None
    try:
        with _usable(run_dir.root):
            if decision.kind == "move_aside":
                moved_to = _free_name(run_dir.root)
                run_dir.root.rename(moved_to)
            run_dir.lock_file.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock = FileLock(run_dir.lock_file)
            except BlockingIOError as error:
                raise _in_use(run_dir) from error
            write_identity(run_dir.identity_file, decision.identity)
            # It tells how the previous start ended, not how the run stands from now on.
            run_dir.summary_file.unlink(missing_ok=True)
        yield EnteredRun(run_dir, decision.identity, decision.changes, moved_to)
    finally:
        if lock is not None:
            lock.release()


def _holds_a_run(run_dir: RunDir) -> bool:
    marks = (run_dir.identity_file, run_dir.config_file, run_dir.streams, run_dir.finetune, run_dir.summary_file)
    return any(mark.exists() for mark in marks)


@contextmanager
def _usable(root: Path) -> Iterator[None]:
    """Whatever the system has against the directory is for the user to change: permissions, a name that is too long, a
    full disk, a read-only file system."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename and str(error.filename) != str(root) else ""
        expected = f"a writable directory; the system says: {error.strerror or error}{place}"
        raise ConfigError("output_dir", str(root), expected, "Choose another output_dir.") from error


def _refuse_unwritable(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise ConfigError("output_dir", str(root), "a directory; it is a file", "Choose another output_dir.")
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        expected = f"a writable directory ({existing} is not)"
        raise ConfigError("output_dir", str(root), expected, "Choose another output_dir.")


def _in_use(run_dir: RunDir) -> ConfigError:
    return ConfigError(
        "output_dir",
        str(run_dir.root),
        "a directory that no other launcher is using",
        "Wait for that run, stop it, or choose another output_dir.",
    )


def _refuse_finished(run_dir: RunDir, old: RunIdentity, started: RunConfig | None, config: RunConfig) -> None:
    try:
        summary: Any = json.loads(run_dir.summary_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError as error:
        raise ConfigError("output_dir", str(run_dir.summary_file), f"JSON text ({error})", _CHOOSE) from error
    if not isinstance(summary, dict) or summary.get("status") != "completed":
        return
    steps, next_step = summary.get("steps"), "Set finetune.max_train_steps to more than {} to train on."
    if isinstance(steps, int) and config.finetune.last_step > steps:
        # What ended the run before its last step: passes over the problems, if anything.
        was_cut = started is not None and steps < started.finetune.last_step
        epochs = started.finetune.max_epochs if started is not None and was_cut else None
        if epochs is None or config.finetune.max_epochs is None or config.finetune.max_epochs > epochs:
            return
        steps, next_step = epochs, "Set finetune.max_epochs to more than {} to train on."
    expected = f"an unfinished run; run {old.run_id} in it is complete"
    raise ConfigError("output_dir", str(run_dir.root), expected, f"{next_step.format(steps)} {_CHOOSE}")


def _free_name(root: Path) -> Path:
    name, number = f"{root.name}.old-{time.strftime('%Y%m%d-%H%M%S')}", 0
    while (candidate := root.with_name(f"{name}-{number}" if number else name)).exists():
        number += 1
    return candidate


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
        lines = ["#!/bin/sh", "# Starts this one job of the run by hand.", needs, *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])


def build_commands(
    world: WorldMap, run_dir: RunDir, environ: Mapping[str, str], search_dirs: Sequence[Path] = ()
) -> list[Command]:
    """The commands of this node's jobs.

    Args:
        world: the plan.
        run_dir: of the run.
        environ: the launcher's environment; lists such as NO_PROXY are extended, not replaced.
        search_dirs: folders with the user's own modules (for the jobs that import them).
    """
    return [build_command(job, world, run_dir, environ, search_dirs) for job in world.local_jobs]


def build_command(
    job: Job, world: WorldMap, run_dir: RunDir, environ: Mapping[str, str], search_dirs: Sequence[Path] = ()
) -> Command:
    """The command of one job; see `build_commands`."""
    module = f"pipelinerl.{_ENTRYPOINTS[job.kind]}"
    argv = (sys.executable, "-m", module, "--run-dir", str(run_dir.root), "--job", job.name)
    ranks = [rank for rank in world.jobs_of("finetune") if rank.node_rank == job.node_rank]
    # A trainer rank sees the GPUs of all ranks of its node, as under torchrun: its own is number LOCAL_RANK.
    gpus = job.gpus if job.kind != "finetune" else [gpu for rank in ranks for gpu in rank.gpus]
    # Calls between the processes of a run bypass an HTTP proxy.
    known = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    hosts = [host for host in known.split(",") if host] + [*_LOOPBACK, *(each.host for each in world.jobs)]
    no_proxy = ",".join(dict.fromkeys(hosts))
    env = {
        JOB_KEY: job.name,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": str(job.cores),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
    if job.kind == "finetune":
        values = (job.idx, world.num_finetune_ranks, job.local_idx, len(ranks), world.master_addr, world.master_port)
        env |= dict(zip(_RANK_KEYS, map(str, values), strict=True))
    if job.kind in _USER_CODE_KINDS and search_dirs:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, search_dirs), environ.get("PYTHONPATH", "")]))
    return Command(job, argv, env)


def child_environment(command: Command, environ: Mapping[str, str], token: str, death_fd: int) -> dict[str, str]:
    """The whole environment of the child, with the secrets that it needs. Secrets are nowhere else: not in argv, not in
    `command.sh`."""
    inherited = {key: value for key, value in environ.items() if key not in (*_RANK_KEYS, NODE_SECRET_KEY)}
    return inherited | dict(command.env) | {TOKEN_KEY: token, DEATH_FD_KEY: str(death_fd)}


@contextmanager
def server_sockets(environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """`environ` with a folder for the sockets inside vLLM servers, removed in the end: nobody else removes those of a
    server that was killed.

    Unchanged if the user named a folder, or if none can be made whose path is short enough.
    """
    try:
        made = (
            None
            if environ.get(SOCKET_FOLDER_KEY)
            else tempfile.TemporaryDirectory(prefix="pipelinerl-", ignore_cleanup_errors=True)
        )
    except OSError:
        made = None
    if made is None:
        yield environ
        return
    with made as folder:
        is_short = len(folder.encode()) + _SOCKET_NAME <= _LONGEST_SOCKET
        yield {**environ, SOCKET_FOLDER_KEY: folder} if is_short else environ
