"""Durable writes: what is on disk after a failure, and who holds a lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelinerl.rundir import durable
from pipelinerl.rundir.durable import FileLock, finish_folder, is_locked, partial_folder, replace_file, start_folder


@pytest.mark.parametrize("is_durable", [False, True])
def test_d2_a_file_is_replaced_whole_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    file = tmp_path / "new" / "file"
    replace_file(file, b"old", is_durable)

    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(durable.os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        replace_file(file, b"new", is_durable)
    assert file.read_bytes() == b"old" and list(file.parent.iterdir()) == [file]


def test_d2_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    final = tmp_path / "7"
    (start_folder(final) / "half").write_text("")
    assert not final.exists()
    (start_folder(final) / "whole").write_text("x")  # after a crash
    finish_folder(final)
    assert [file.name for file in final.iterdir()] == ["whole"] and not partial_folder(final).exists()


def test_a_lock_names_its_owner_and_is_free_after_release(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path) and not path.exists()
    lock = FileLock(path)
    assert is_locked(path)
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
        FileLock(path)
    lock.release()
    lock.release()
    assert not is_locked(path)
    FileLock(path).release()
