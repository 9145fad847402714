"""Folders that are complete or absent: written beside their place, made durable, then renamed. No torch.

Called by checkpoints, the model export and the choice of the best model. A crash at any byte leaves the old state, and
a leftover `.partial-*` folder that the next write removes.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from pathlib import Path

logger = logging.getLogger(__name__)

PARTIAL_PREFIX = ".partial-"
_BLOCK_BYTES = 1 << 20


def partial_folder(final: Path) -> Path:
    """Where `final` is written before it is complete (same file system)."""
    return final.parent / f"{PARTIAL_PREFIX}{final.name}"


def start_folder(final: Path) -> Path:
    """Create an empty partial folder for `final` and return it."""
    partial = partial_folder(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def finish_folder(final: Path) -> None:
    """Make the partial folder durable and give it its name. An older folder of that name is replaced."""
    partial = partial_folder(final)
    sync_tree(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    sync_path(final.parent)


def remove_folder(folder: Path) -> None:
    """Delete `folder`; a failure is a warning."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s could not be removed: %s", folder, error)


def point_link(link: Path, target: Path) -> None:
    """Let the symbolic link `link` point to `target` in one atomic step (relative, so that the run may be moved)."""
    draft = link.parent / f"{PARTIAL_PREFIX}{link.name}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    draft.replace(link)
    sync_path(link.parent)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk."""
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
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
