"""How another terminal asks the launcher to add or remove a server: files in the run's folder `pool`.

The command `pool` writes a request and waits for the answer and for the state of the server; the launcher takes
requests on its ticks. Nothing secret is in these files: servers of a run share its token, which travels by environment.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.run.server_keeper import Server
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.waiting import DirectoryWatch

_STATE_NAME = "servers.json"
_REQUEST_SUFFIX = ".request.json"
_ANSWER_SUFFIX = ".answer.json"


class PoolRequest(msgspec.Struct, frozen=True):
    """`server` is a URL, or for `remove` also a name."""

    action: Literal["add", "remove"]
    server: str


class PoolReply(msgspec.Struct, frozen=True):
    """The launcher's answer: the name of the server, or why not."""

    name: str | None
    error: str | None = None


class ServerState(msgspec.Struct, frozen=True):
    """One server as the launcher sees it; `version` is the one that it came (back) with."""

    name: str
    url: str
    state: Literal["starting", "serving", "down", "removed"]
    starts: int
    joined: bool
    version: int | None = None
    trouble: str = ""


def pool_dir(run_dir: RunDir) -> Path:
    return run_dir.root / "pool"


def write_state(run_dir: RunDir, servers: list[Server]) -> None:
    """Say how the servers are."""
    states = [
        ServerState(
            server.name,
            server.url,
            server.state,
            server.generation + 1,
            server.joined,
            server.version,
            server.trouble,
        )
        for server in servers
    ]
    _write(pool_dir(run_dir) / _STATE_NAME, msgspec.json.format(msgspec.json.encode(states)))


def read_state(run_dir: RunDir) -> list[ServerState]:
    """The servers as the launcher last said; none before a run has started."""
    try:
        return msgspec.json.decode((pool_dir(run_dir) / _STATE_NAME).read_bytes(), type=list[ServerState])
    except FileNotFoundError:
        return []


def take_requests(run_dir: RunDir, answer: Callable[[PoolRequest], PoolReply]) -> None:
    """Launcher: answer every request that is there, oldest first."""
    folder = pool_dir(run_dir)
    for file in sorted(folder.glob(f"*{_REQUEST_SUFFIX}"), key=_age_key):
        try:
            reply = answer(msgspec.json.decode(file.read_bytes(), type=PoolRequest))
        except FileNotFoundError:
            continue  # taken back: nobody waits for the answer any more
        except msgspec.MsgspecError as error:
            reply = PoolReply(None, f"not a request: {error}")
        file.unlink(missing_ok=True)
        name = file.name.removesuffix(_REQUEST_SUFFIX)
        _write(folder / f"{name}{_ANSWER_SUFFIX}", msgspec.json.encode(reply))


def _age_key(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def forget_requests(run_dir: RunDir) -> None:
    """Launcher, at its start: nobody waits for what is left of an earlier one."""
    folder = pool_dir(run_dir)
    for suffix in (_REQUEST_SUFFIX, _ANSWER_SUFFIX):
        for file in folder.glob(f"*{suffix}"):
            file.unlink(missing_ok=True)


def ask(run_dir: RunDir, request: PoolRequest, timeout_s: float) -> str:
    """Command: send `request` and return the server's name.

    Raises:
        ConfigError: the launcher refuses, or does not answer in time.
    """
    folder = pool_dir(run_dir)
    name = uuid.uuid4().hex
    answer_file = folder / f"{name}{_ANSWER_SUFFIX}"
    request_file = folder / f"{name}{_REQUEST_SUFFIX}"
    _write(request_file, msgspec.json.encode(request))
    try:
        _wait(folder, answer_file.exists, timeout_s, request, "an answer of the launcher")
    finally:
        request_file.unlink(missing_ok=True)
    reply = msgspec.json.decode(answer_file.read_bytes(), type=PoolReply)
    answer_file.unlink()
    if reply.name is None:
        raise ConfigError(f"pool {request.action}", request.server, str(reply.error), "See `pool list RUN_DIR`.")
    return reply.name


def wait_serving(run_dir: RunDir, request: PoolRequest, name: str, timeout_s: float) -> ServerState:
    """Command: block until the server takes rollouts.

    Raises:
        ConfigError: it cannot be used, or not in time.
    """

    def state() -> ServerState:
        return next(server for server in read_state(run_dir) if server.name == name)

    _wait(
        pool_dir(run_dir), lambda: state().state in ("serving", "removed"), timeout_s, request, "the server to be used"
    )
    found = state()
    if found.state == "removed":
        raise ConfigError(f"pool {request.action}", request.server, "a server that takes the weights", found.trouble)
    return found


def _wait(folder: Path, found: Callable[[], bool], timeout_s: float, request: PoolRequest, what: str) -> None:
    end = time.monotonic() + timeout_s
    watch = DirectoryWatch(folder)
    try:
        while not found():
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise ConfigError(
                    f"pool {request.action}", request.server, f"{what} within {timeout_s:g} s", "Does the run go on?"
                )
            watch.wait(left_s)
    finally:
        watch.close()


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    draft.write_bytes(content)
    os.replace(draft, file)
