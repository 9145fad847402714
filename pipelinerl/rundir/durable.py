"""Writes that survive a crash: atomically replaced files, folders that are complete or absent, fsync policies, locks,
and temporary folders that do not outlive their process.

A folder is written next to its final place as `.partial-<name>`, synced, then renamed. A crash at any byte leaves the
old state and at most a partial folder, which the next write removes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

PARTIAL_PREFIX = ".partial-"
FsyncPolicy = Literal["never", "interval", "always"]
INTERVAL_S = 1.0
_BLOCK_BYTES = 1 << 20


def replace_file(path: Path, content: bytes, durable: bool = False) -> None:
    """Replace the file `path` atomically; its folder is created. `durable` also syncs it to the disk.

    Raises:
        OSError: the old file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        draft.write_bytes(content)
        if durable:
            sync_path(draft)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def partial_folder(final: Path) -> Path:
    """Where `final` is written until it is complete (on the same file system)."""
    return final.parent / f"{PARTIAL_PREFIX}{final.name}"


def start_folder(final: Path) -> Path:
    """Create an empty partial folder for `final` and return it."""
    partial = partial_folder(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def finish_folder(final: Path) -> None:
    """Sync the partial folder and rename it to `final`, replacing an older folder of that name."""
    partial = partial_folder(final)
    sync_tree(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    sync_path(final.parent)


def remove_folder(folder: Path) -> None:
    """Delete `folder`; a failure is only a warning."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s could not be removed: %s", folder, error)


def point_link(link: Path, target: Path) -> None:
    """Point the symbolic link `link` to `target` atomically (relative, so that the run can be moved)."""
    draft = link.parent / f"{PARTIAL_PREFIX}{link.name}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    draft.replace(link)
    sync_path(link.parent)


def sync_tree(folder: Path) -> None:
    """Sync every file and folder below `folder` to the disk."""
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    """Sync one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes, CRC-32) of every file below `folder`, by relative name."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, crc32(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value


class FileLock:
    """An exclusive lock on `path`, held from construction to `release` or to the end of the process.

    The kernel drops it however the process ends, so locks are never stale. The file holds the owner's process id.

    Raises:
        BlockingIOError: another process holds it; `strerror` names it.
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(error.errno, f"locked by process {owner}", str(path)) from None
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Drop the lock. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_locked(path: Path) -> bool:
    """Whether a process holds the `FileLock` of `path` now. Creates nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class ScratchFolder:
    """A context manager for a private folder in `parent` (None: the temporary folder), removed at the end.

    Folders of the same kind that killed processes left are removed first: the kernel has dropped their locks.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, kind: str, parent: str | None = None) -> None:
        prefix = f"pipelinerl-{kind}-"
        for folder in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_unlocked(folder)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process removed it before it was opened
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if self.path.exists():  # else another process removed it before it was locked
                return
            os.close(self._fd)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _remove_unlocked(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # somebody else's, or gone
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # in use, or on a file system without locks
    finally:
        os.close(fd)


class Syncer:
    """Syncs one file descriptor to the disk: `never`, at an `interval` (from a thread), or `always` (every write).

    The policy matters if the machine dies; what the kernel has survives the death of the process. Call `wrote`, `sync`
    and `replace` under the writer's lock; they raise an error of the thread.
    """

    def __init__(self, policy: FsyncPolicy) -> None:
        self.policy = policy
        self._condition = threading.Condition()
        self._fd = -1
        self._dirty = False
        self._closed = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if policy == "interval":
            self._thread = threading.Thread(target=self._run, name="stream-fsync", daemon=True)
            self._thread.start()

    def wrote(self) -> None:
        """Call after each write."""
        if self.policy == "always":
            os.fdatasync(self._fd)
        elif self.policy == "interval":
            with self._condition:
                self._raise_error()
                self._dirty = True
                self._condition.notify()

    def sync(self) -> None:
        """Sync everything written so far, unless the policy is `never`."""
        if self.policy == "never" or self._fd < 0:
            return
        with self._condition:
            self._raise_error()
            self._dirty = False
            os.fdatasync(self._fd)

    def replace(self, fd: int) -> None:
        """Sync the current file, then continue with `fd`."""
        self.sync()
        with self._condition:
            self._fd = fd

    def close(self) -> None:
        """Sync once more and end the thread. The file descriptor stays open."""
        try:
            self.sync()
        finally:
            with self._condition:
                self._closed = True
                self._fd = -1
                self._condition.notify()
            if self._thread is not None:
                self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        last_sync = time.monotonic()
        with self._condition:
            while not self._closed:
                self._condition.wait_for(lambda: self._dirty or self._closed)
                rest = last_sync + INTERVAL_S - time.monotonic()
                if rest > 0:
                    self._condition.wait_for(lambda: self._closed, timeout=rest)
                if self._dirty and not self._closed:
                    self._dirty = False
                    try:
                        os.fdatasync(self._fd)
                    except OSError as error:
                        logger.error("fsync failed: %s", error)
                        self._error = error
                        return
                    last_sync = time.monotonic()
