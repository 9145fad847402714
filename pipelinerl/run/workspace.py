"""The run directory at the start of a run: new, continued, moved aside or refused. Called by the launcher.

`inspect` only looks, so that a refusal leaves everything as it was; `enter` writes. A lock, held for the life of the
launcher, keeps a second one out.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.errors import ConfigError
from pipelinerl.run.config_changes import Change, find_changes, refuse_fixed
from pipelinerl.run.reference_change import fix_reference
from pipelinerl.run.trained import has_trained
from pipelinerl.rundir.identity import RunIdentity, read_identity, write_identity
from pipelinerl.rundir.layout import RunDir

_NOT_IDENTITY = ("output_dir", "force_restart", "dry_run")
_CHOOSE = "Choose another output_dir, or set force_restart=true to move the old content aside and start anew."


@dataclass(frozen=True)
class Decision:
    """What to do with the directory. `identity` is the one this start will have; `changes` are the keys of the
    configuration that differ from those of the start before."""

    kind: Literal["new", "continue", "move_aside"]
    run_dir: RunDir
    identity: RunIdentity
    changes: tuple[Change, ...] = ()


@dataclass
class Workspace:
    """An entered run directory; `close` lets another launcher in."""

    run_dir: RunDir
    identity: RunIdentity
    moved_to: Path | None
    _lock: int

    def close(self) -> None:
        os.close(self._lock)


def config_hash(config: RunConfig) -> str:
    """Hash of everything that makes two configurations the same run."""
    data = config.model_dump(mode="json", exclude=set(_NOT_IDENTITY))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def inspect(config: RunConfig, new_run_id: str) -> Decision:
    """Decide without writing anything.

    A run that ended early is continued from its newest checkpoint, or from the start if it has none yet; a complete one
    if there are more steps to train now. One that never trained a step is moved aside if a value is corrected that
    must not change later: a new run begins.

    Raises:
        ConfigError: the directory cannot be used: another launcher runs in it, it holds another run or a finished
            one, or the run in it was started with a value that must not change.
    """
    run_dir = RunDir(Path(config.output_dir).absolute())
    with _usable(run_dir.root):
        return _inspect(config, run_dir, new_run_id)


def _inspect(config: RunConfig, run_dir: RunDir, new_run_id: str) -> Decision:
    root, digest = run_dir.root, config_hash(config)
    fresh = RunIdentity(run_id=new_run_id, incarnation=0, config_hash=digest)
    if root.exists() and not root.is_dir():
        raise ConfigError("output_dir", str(root), "a directory, it is a file", "Choose another output_dir.")
    _refuse_unwritable(root)
    if not _holds_a_run(run_dir):
        return Decision("new", run_dir, fresh)
    if is_running(run_dir):
        raise _running(run_dir)
    if config.force_restart:
        return Decision("move_aside", run_dir, fresh)
    if not run_dir.identity_file.exists():
        raise ConfigError(
            "output_dir", str(root), "a new directory or a run of pipelinerl; it holds streams or weights", _CHOOSE
        )
    old = read_identity(run_dir.identity_file)
    _refuse_finished(run_dir, old, config)
    changes: list[Change] = []
    if run_dir.config_file.exists():  # without it the last start ended before it came to anything
        started = load_config(run_dir.config_file)
        changes = fix_reference(find_changes(started, config), started, config, run_dir)
        if any(change.why_fixed for change in changes) and not has_trained(run_dir, started):
            # Another run, under a name of its own: nothing that the old one wrote is read by it.
            return Decision("move_aside", run_dir, fresh, tuple(changes))
    refuse_fixed(changes, str(root))
    identity = RunIdentity(run_id=old.run_id, incarnation=old.incarnation + 1, config_hash=digest)
    return Decision("continue", run_dir, identity, tuple(changes))


def enter(decision: Decision, clock: Callable[[], float] = time.time) -> Workspace:
    """Do what was decided: move the old run aside or create the directory, lock it, write the identity.

    Raises:
        ConfigError: the system refuses it, or another launcher was quicker.
    """
    with _usable(decision.run_dir.root):
        return _enter(decision, clock)


def _enter(decision: Decision, clock: Callable[[], float]) -> Workspace:
    run_dir, moved_to = decision.run_dir, None
    if decision.kind == "move_aside":
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
        moved_to = _free_name(run_dir.root, stamp)
        run_dir.root.rename(moved_to)
    lock_file = _lock_file(run_dir)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise _running(run_dir) from error
    try:
        write_identity(run_dir.identity_file, decision.identity)
        # It says how the last start ended, which is not how the run stands from now on.
        run_dir.summary_file.unlink(missing_ok=True)
    except OSError:
        os.close(lock)
        raise
    return Workspace(run_dir, decision.identity, moved_to, lock)


def _lock_file(run_dir: RunDir) -> Path:
    return run_dir.root / "conf" / "launch.lock"


def _holds_a_run(run_dir: RunDir) -> bool:
    marks = (run_dir.identity_file, run_dir.config_file, run_dir.streams, run_dir.finetune, run_dir.summary_file)
    return any(mark.exists() for mark in marks)


@contextmanager
def _usable(root: Path) -> Iterator[None]:
    """Whatever the system has against the directory is for the user to change: rights, a name that is too long, a full
    disk, a file system that takes no folders."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename and str(error.filename) != str(root) else ""
        raise ConfigError(
            "output_dir",
            str(root),
            f"a directory that can be written; the system says: {error.strerror or error}{place}",
            "Choose another output_dir.",
        ) from error


def _refuse_unwritable(root: Path) -> None:
    existing = root
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            "output_dir",
            str(root),
            f"a directory that can be written ({existing} cannot)",
            "Choose another output_dir.",
        )


def is_running(run_dir: RunDir) -> bool:
    """Whether a launcher is in the directory right now."""
    if not _lock_file(run_dir).exists():
        return False
    lock = os.open(_lock_file(run_dir), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _running(run_dir: RunDir) -> ConfigError:
    return ConfigError(
        "output_dir",
        str(run_dir.root),
        "a directory that no other launcher is using right now",
        "Wait for that run, stop it, or choose another output_dir.",
    )


def _refuse_finished(run_dir: RunDir, old: RunIdentity, config: RunConfig) -> None:
    summary = _summary(run_dir)
    steps, next_step = summary.get("steps"), ""
    if summary.get("status") != "completed":
        return
    if isinstance(steps, int) and config.finetune.last_step > steps:
        epochs = _epochs_done(run_dir, steps)
        if epochs is None or config.finetune.max_epochs is None or config.finetune.max_epochs > epochs:
            return
        next_step = (
            f"Set finetune.max_epochs (agent.max_epochs with an agent function) to more than {epochs} to train on."
        )
    raise ConfigError(
        "output_dir",
        str(run_dir.root),
        f"an unfinished run; run {old.run_id} in it is complete",
        f"{next_step or f'Set finetune.max_train_steps to more than {steps} to train on.'} {_CHOOSE}",
    )


def _epochs_done(run_dir: RunDir, steps: int) -> int | None:
    """The `finetune.max_epochs` that ended the complete run after `steps` steps; None if something else ended it."""
    if not run_dir.config_file.exists():
        return None
    started = load_config(run_dir.config_file).finetune
    return started.max_epochs if steps < started.last_step else None


def _summary(run_dir: RunDir) -> dict[str, Any]:
    try:
        summary = json.loads(run_dir.summary_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError("output_dir", str(run_dir.summary_file), f"JSON text ({error})", _CHOOSE) from error
    return summary if isinstance(summary, dict) else {}


def _free_name(root: Path, stamp: str) -> Path:
    candidate, number = root.with_name(f"{root.name}.old-{stamp}"), 1
    while candidate.exists():
        candidate, number = root.with_name(f"{root.name}.old-{stamp}-{number}"), number + 1
    return candidate
