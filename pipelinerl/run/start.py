"""How a run starts: its directory (new, continued, moved aside or refused), and the commands and environment of its
jobs.

`inspect` only reads, so a refusal changes nothing; `enter` writes. The launcher holds a lock for its lifetime, which
keeps a second one out. Most keys may change between two starts of a run. Those in `FIXED` may not, because data on disk
(training state, streams, order of problems) depends on them.
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.records import StepDone, TrainerMessage
from pipelinerl.role import DEATH_FD_KEY, JOB_KEY, SECRET_KEYS, TOKEN_KEY
from pipelinerl.run.processes import Event
from pipelinerl.rundir.durable import FileLock, ScratchFolder, is_locked
from pipelinerl.rundir.layout import RunDir, RunIdentity, read_identity, write_identity
from pipelinerl.streams.base import TRAINER, TRAINER_TOPIC
from pipelinerl.streams.hub import StreamHub, backend_of, lost_streams
from pipelinerl.streams.read import read_all
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.jobs import ALLOCATOR_KEYS

_NOT_COMPARED = ("output_dir", "force_restart", "dry_run")
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
#: In addition, for an evaluation alone.
FIXED_OF_EVALUATION = dict.fromkeys(
    (
        *("test_dataset_names", "eval", "test_llm", "llm", "agent", "custom", "rewards", "environment"),
        *(f"actor.{key}" for key in ("test_samples", "rollout_policy", "system_prompt", "task_template", "examples")),
    ),
    "the rollouts in it were made with it",
)
#: Keys that add reference servers to a run with a local reference model, and to one without.
_PLACE_KEYS = ("finetune.rl.reference", "world.preprocessor_fraction", "world.num_preprocessor_llms")
_KL_KEYS = ("finetune.rl.kl_coef", "finetune.rl.final_kl_coef", "finetune.rl.reward_minus_kl_coef")
_CHOOSE = "Choose another output_dir, or set force_restart=true to move the old content aside and start over."

#: Where vLLM creates its sockets.
SOCKET_FOLDER_KEY = "VLLM_RPC_BASE_PATH"
# Limit of a Unix socket's path on Linux (`sun_path` with its terminator), and the name of one of vLLM's.
_LONGEST_SOCKET, _SOCKET_LENGTH = 107, len("/00000000-0000-0000-0000-000000000000")
_SCRATCH_LENGTH = len("/pipelinerl-sockets-00000000")
#: Used where the path of the temporary folder is long, as on some clusters.
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
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
# Set by `accelerate launch` and torchrun to configure training. Here the configuration of the run decides.
_TRAINER_VARIABLES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Change:
    """One key that differs from the previous start; `why_fixed` says why it must not, if so."""

    key: str
    old: Any
    new: Any
    why_fixed: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


@dataclass(frozen=True)
class Decision:
    """What to do with the directory. `identity` is that of this start; `moved_to` is where `enter` moved the previous
    run."""

    kind: Literal["new", "continue", "move_aside"]
    run_dir: RunDir
    identity: RunIdentity
    changes: tuple[Change, ...] = ()
    moved_to: Path | None = None


def inspect(config: RunConfig, is_locked_by_us: bool = False) -> Decision:
    """Decide without writing anything.

    A run that ended early continues from its newest checkpoint, or from the first step if it has none; a complete run
    continues if there are more steps to train. A run without any finished step is moved aside if a fixed key changed.

    Args:
        config: of this start.
        is_locked_by_us: this launcher holds the directory.

    Raises:
        ConfigError: the directory cannot be used: another launcher runs in it, it holds another run or a finished one,
            or the run in it was started with a value that must not change.
    """
    run_dir = RunDir(Path(config.output_dir).absolute())
    fresh = RunIdentity(run_id=f"{run_dir.root.name}-{secrets.token_hex(4)}", incarnation=0)
    with _usable(run_dir.root):
        existing = next(folder for folder in (run_dir.root, *run_dir.root.parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise _refusal(run_dir, f"a writable directory ({existing} is not)", "Choose another output_dir.")
        marks = (run_dir.identity_file, run_dir.config_file, run_dir.streams, run_dir.finetune, run_dir.summary_file)
        if not any(mark.exists() for mark in marks):
            return Decision("new", run_dir, fresh)
        if not is_locked_by_us and is_locked(run_dir.lock_file):
            raise _in_use(run_dir)
        if config.force_restart:
            return _moved_aside(run_dir, fresh)
        if not run_dir.identity_file.exists():
            raise _refusal(run_dir, "a new directory or a run of pipelinerl; it holds streams or weights", _CHOOSE)
        old = read_identity(run_dir.identity_file)
        continued = Decision("continue", run_dir, RunIdentity(run_id=old.run_id, incarnation=old.incarnation + 1))
        # Without a config the previous start ended before it did anything.
        started = load_config(run_dir.config_file) if run_dir.config_file.exists() else None
        summary = _summary_of(run_dir)
        _refuse_finished(run_dir, old, started, config, summary)
        if started is None:
            return continued
        if lost := lost_streams(run_dir):
            raise _refusal(
                run_dir,
                f"all streams of the run in it (missing: {', '.join(lost)})",
                f"Restore what is missing. {_CHOOSE}",
            )
        changes = tuple(find_changes(started, config))
        fixed = [change for change in changes if change.why_fixed]
        if not fixed:
            return replace(continued, changes=changes)
        if not _has_trained(run_dir, started, summary.get("steps")):
            return _moved_aside(run_dir, fresh, changes)
        also = f" Also changed and fixed: {'; '.join(map(str, fixed[1:]))}." if fixed[1:] else ""
        raise ConfigError(
            fixed[0].key,
            fixed[0].new,
            f"{fixed[0].old!r}, as {run_dir.root} was started with ({fixed[0].why_fixed})",
            f"Set it back, choose another output_dir, or set force_restart=true to move the old run aside.{also}",
        )


def _moved_aside(run_dir: RunDir, fresh: RunIdentity, changes: tuple[Change, ...] = ()) -> Decision:
    if os.path.ismount(run_dir.root):
        inside = f"Use a folder inside it: output_dir={run_dir.root / 'run'}."
        raise _refusal(run_dir, "a directory that can be moved aside; it is a mount point", inside)
    return Decision("move_aside", run_dir, fresh, changes)


@contextmanager
def enter(config: RunConfig) -> Iterator[Decision]:
    """Enter the directory as `inspect` decides: move the old run aside or create the directory, lock it, write the
    identity. The lock is released on exit.

    Raises:
        ConfigError: as `inspect`; or the system refuses the directory, or another launcher was faster.
    """
    run_dir, lock = inspect(config).run_dir, None
    try:
        with _usable(run_dir.root):
            lock = _lock(run_dir)
            # Another launcher may have come and gone before the lock was taken.
            decision = inspect(config, is_locked_by_us=True)
            if decision.kind == "move_aside":
                moved_to = run_dir.root.rename(_free_name(run_dir.root))
                decision = replace(decision, moved_to=moved_to)
                lock.release()
                lock = _lock(run_dir)
            write_identity(run_dir.identity_file, decision.identity)
            # It describes the previous start.
            run_dir.summary_file.unlink(missing_ok=True)
        yield decision
    finally:
        if lock is not None:
            lock.release()


def _lock(run_dir: RunDir) -> FileLock:
    run_dir.lock_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(run_dir.lock_file)
    except BlockingIOError as error:
        raise _in_use(run_dir) from error


@contextmanager
def _usable(root: Path) -> Iterator[None]:
    """Turn an OSError (permissions, too long a name, a full disk, a read-only file system) into a ConfigError."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename and str(error.filename) != str(root) else ""
        expected = f"a writable directory; the system says: {error.strerror or error}{place}"
        raise ConfigError("output_dir", str(root), expected, "Choose another output_dir.") from error


def _refusal(run_dir: RunDir, expected: str, next_step: str) -> ConfigError:
    return ConfigError("output_dir", str(run_dir.root), expected, next_step)


def _in_use(run_dir: RunDir) -> ConfigError:
    next_step = "Wait for that run, stop it, or choose another output_dir."
    return _refusal(run_dir, "a directory that no other launcher is using", next_step)


def _summary_of(run_dir: RunDir) -> dict[str, Any]:
    """What the previous start left when it ended; empty if nothing."""
    try:
        summary = json.loads(run_dir.summary_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError("output_dir", str(run_dir.summary_file), f"JSON text ({error})", _CHOOSE) from error
    return summary if isinstance(summary, dict) else {}


def _refuse_finished(
    run_dir: RunDir, old: RunIdentity, started: RunConfig | None, config: RunConfig, summary: Mapping[str, Any]
) -> None:
    if summary.get("status") != "completed":
        return
    if config.debug.mode == "evaluation":
        raise _refusal(run_dir, f"an unfinished evaluation; {run_dir.evaluation_file} has the results of it", _CHOOSE)
    key, done = "max_train_steps", summary.get("steps")
    if isinstance(done, int) and config.finetune.last_step > done:
        # Before its last step a run can only have been ended by the number of epochs.
        was_cut = started is not None and done < started.finetune.last_step
        epochs = started.finetune.max_epochs if started is not None and was_cut else None
        if epochs is None or config.finetune.max_epochs is None or config.finetune.max_epochs > epochs:
            return
        key, done = "max_epochs", epochs
    more = f"Set finetune.{key} to more than {done} to train on. {_CHOOSE}"
    raise _refusal(run_dir, f"an unfinished run; run {old.run_id} in it is complete", more)


def _free_name(root: Path) -> Path:
    name, number = f"{root.name}.old-{time.strftime('%Y%m%d-%H%M%S')}", 0
    while (candidate := root.with_name(f"{name}-{number}" if number else name)).exists():
        number += 1
    return candidate


def find_changes(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every key whose value differs, in the order of the schema."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    fixed = {**FIXED, **_reference_keys(old, new)}
    if new.debug.mode == "evaluation":
        fixed |= FIXED_OF_EVALUATION
    if old.finetune.rl.uses_values != new.finetune.rl.uses_values:
        fixed["finetune.rl.advantage_estimator"] = _PARAMETERS

    def why(key: str) -> str | None:
        if key == "finetune.lora.sync":  # does not belong to the training state
            return None
        return next((why for name, why in fixed.items() if key == name or key.startswith(f"{name}.")), None)

    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in _NOT_COMPARED]
    return [Change(key, before.get(key), after.get(key), why(key)) for key in keys]


def _reference_keys(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """Keys that must not change because that would add reference servers: batches already in the stream have no
    log-probs from them. (Removing the servers is fine: the trainer's own reference model replaces them.)"""
    asked, asks = (
        config.finetune.rl.needs_reference and not config.uses_local_reference(config.has_reference_pool)
        for config in (old, new)
    )
    if not asks or asked or not new.has_stage("finetune"):
        return {}
    keys = _PLACE_KEYS if old.finetune.rl.needs_reference else _KL_KEYS
    return dict.fromkeys(keys, "batches that wait in the stream have no log-probs of reference servers")


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _has_trained(run_dir: RunDir, config: RunConfig, steps: int | None) -> bool:
    """False if the run in `run_dir` has certainly not finished an optimizer step. `steps`: as its summary has it.

    A stage without a trainer (`debug.mode`) always counts as trained: its records are its result.
    """
    # Hidden files are messages between ranks at their start.
    folder = run_dir.finetune
    has_weights = folder.is_dir() and any(not file.name.startswith(".") for file in folder.iterdir())
    if not config.has_stage("finetune") or has_weights:
        return True
    if steps or not backend_of(config.streams).is_on_disk:
        return bool(steps != 0)  # the records are in a server that is down: only the summary knows
    try:
        messages = read_all(StreamHub(config.streams, run_dir), TRAINER_TOPIC, TRAINER, TrainerMessage)
        return any(isinstance(message, StepDone) for message in messages)
    except StreamError:
        return True  # unknown


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


@dataclass(frozen=True)
class RunSession:
    """One start of a run. `token` opens the servers' routes and is kept in memory only. `restarts` has the reason of
    each automatic restart so far."""

    config: RunConfig
    world: WorldMap
    run_dir: RunDir
    identity: RunIdentity
    commands: Sequence[Command]
    environ: Mapping[str, str]
    token: str
    events: SimpleQueue[Event]
    restarts: tuple[str, ...] = ()


def build_command(
    job: Job, world: WorldMap, run_dir: RunDir, environ: Mapping[str, str], search_dirs: Sequence[Path] = ()
) -> Command:
    """How to start `job`. `environ` is the launcher's; lists such as NO_PROXY are extended, not replaced."""
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
        if world.device == "cuda" and not _sets_allocator(environ):
            # Micro-batches of many lengths leave gaps in segments of a fixed size, up to twice the memory.
            env[ALLOCATOR_KEYS[0]] = "expandable_segments:True"
    if job.kind in _USER_CODE_KINDS and search_dirs:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, search_dirs), environ.get("PYTHONPATH", "")]))
    return Command(job, argv, env)


def _sets_allocator(environ: Mapping[str, str]) -> bool:
    return any(key in environ for key in ALLOCATOR_KEYS)


def trainer_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that would change how the trainer trains: precision, compilation, accumulation."""
    return sorted(name for name in environ if name.startswith(_TRAINER_VARIABLES))


def child_environment(command: Command, environ: Mapping[str, str], token: str, death_fd: int) -> dict[str, str]:
    """The whole environment of the child, with the secrets that it needs. They are never in argv or `command.sh`."""
    dropped = {*_RANK_KEYS, *SECRET_KEYS, *trainer_variables(environ)}
    inherited = {key: value for key, value in environ.items() if key not in dropped}
    own = dict(command.env)
    if _sets_allocator(environ):  # on this node
        own.pop(ALLOCATOR_KEYS[0], None)
    return inherited | own | {TOKEN_KEY: token, DEATH_FD_KEY: str(death_fd)}


def socket_parent(environ: Mapping[str, str]) -> str | None:
    """The folder for vLLM's sockets: the one that the user set, or a temporary one; None if none is writable with a
    path short enough for a socket."""
    named, temporary = environ.get(SOCKET_FOLDER_KEY), [*_SHORT_FOLDERS]
    with suppress(OSError):
        temporary.insert(0, tempfile.gettempdir())
    longest = _LONGEST_SOCKET - _SOCKET_LENGTH - (0 if named else _SCRATCH_LENGTH)
    folders = [folder for folder in ([named] if named else temporary) if len(os.fsencode(folder)) <= longest]
    return next((folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)), None)


@contextmanager
def server_sockets(environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """`environ` with a folder for vLLM's sockets, which a killed server leaves behind. It is removed on exit; the
    folder of a killed launcher is removed by the next one.

    Unchanged if the user set a folder, or if none can be made.
    """
    made = None
    if not environ.get(SOCKET_FOLDER_KEY) and (parent := socket_parent(environ)) is not None:
        with suppress(OSError):
            made = ScratchFolder("sockets", parent)
    with made or nullcontext() as folder:
        yield environ if folder is None else {**environ, SOCKET_FOLDER_KEY: str(folder)}
