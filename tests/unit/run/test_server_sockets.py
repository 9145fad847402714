"""The folder of the servers' sockets."""

from __future__ import annotations

import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from pipelinerl.run.server_sockets import FOLDER_KEY, server_sockets


def test_sockets_go_with_the_run():
    with server_sockets({"A": "1"}) as environ, socket.socket(socket.AF_UNIX) as left_behind:
        folder = Path(environ[FOLDER_KEY])
        left_behind.bind(str(folder / str(uuid.uuid4())))
        assert environ["A"] == "1" and folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_a_folder_of_the_user_stays(tmp_path: Path):
    named = {FOLDER_KEY: str(tmp_path)}
    with server_sockets(named) as environ:
        assert environ == named
    assert tmp_path.exists()


def test_a_folder_with_too_long_a_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with server_sockets({}) as environ:
        assert FOLDER_KEY not in environ
    assert not any(deep.iterdir())


def test_without_room_for_it_servers_do_as_they_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is only tidiness does not end a run: what needs the folder for temporary files says so itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with server_sockets({"A": "1"}) as environ:
        assert environ == {"A": "1"}


def test_vllm_creates_its_sockets_there(monkeypatch: pytest.MonkeyPatch):
    """The contract with vLLM: the key's name."""
    network_utils = pytest.importorskip("vllm.utils.network_utils")
    with server_sockets({}) as environ:
        monkeypatch.setenv(FOLDER_KEY, environ[FOLDER_KEY])
        path = network_utils.get_open_zmq_ipc_path()
        assert path.startswith(f"ipc://{environ[FOLDER_KEY]}/")
        assert len(path.removeprefix("ipc://")) == len(environ[FOLDER_KEY]) + 37
