"""Servers of a running run, from another terminal: `python -m pipelinerl pool list|add|remove ...`.

The command writes a request into the run's folder `pool` and waits for the answer and the state of the server; the
launcher answers between events. These files hold no secrets: the servers' token is passed by environment.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pipelinerl.commands import typed
from pipelinerl.errors import ConfigError
from pipelinerl.rundir.durable import replace_file
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.open_run import find_run
from pipelinerl.streams.waiting import DirectoryWatch

_STATE_NAME = "servers.json"
_REQUEST, _ANSWER = ".request.json", ".answer.json"
_ANSWER_TIMEOUT_S = 60.0


class PoolRequest(msgspec.Struct, frozen=True):
    """`server` is a URL, or for `remove` also a name."""

    action: Literal["add", "remove"]
    server: str


class PoolReply(msgspec.Struct, frozen=True):
    """The launcher's answer: the name of the server, or why not."""

    name: str | None
    error: str | None = None


class ServerState(msgspec.Struct, frozen=True):
    """One server as the launcher sees it; `version` is that of its weights when it joined or came back."""

    name: str
    url: str
    state: Literal["starting", "serving", "down", "removed"]
    starts: int
    joined: bool
    version: int | None = None
    trouble: str = ""


def pool_dir(run_dir: RunDir) -> Path:
    return run_dir.root / "pool"


def write_state(run_dir: RunDir, states: Sequence[ServerState]) -> None:
    """Launcher: write the state of the servers."""
    replace_file(pool_dir(run_dir) / _STATE_NAME, msgspec.json.format(msgspec.json.encode(states)))


def read_state(run_dir: RunDir) -> list[ServerState]:
    """The state that the launcher last wrote; empty before a run has started."""
    try:
        return msgspec.json.decode((pool_dir(run_dir) / _STATE_NAME).read_bytes(), type=list[ServerState])
    except FileNotFoundError:
        return []


def take_requests(run_dir: RunDir, answer: Callable[[PoolRequest], PoolReply]) -> None:
    """Launcher: answer all requests."""
    for file in pool_dir(run_dir).glob(f"*{_REQUEST}"):
        try:
            reply = answer(msgspec.json.decode(file.read_bytes(), type=PoolRequest))
        except FileNotFoundError:
            continue  # withdrawn: the command gave up
        except msgspec.MsgspecError as error:
            reply = PoolReply(None, f"not a request: {error}")
        file.unlink(missing_ok=True)
        replace_file(file.with_name(file.name.replace(_REQUEST, _ANSWER)), msgspec.json.encode(reply))


def forget_requests(run_dir: RunDir) -> None:
    """Launcher, at its start: remove what an earlier one left."""
    for suffix in (_REQUEST, _ANSWER):
        for file in pool_dir(run_dir).glob(f"*{suffix}"):
            file.unlink(missing_ok=True)


def ask(run_dir: RunDir, request: PoolRequest, timeout_s: float) -> str:
    """Command: send `request` and return the server's name.

    Raises:
        ConfigError: the launcher refuses, or does not answer in time.
    """
    name = uuid.uuid4().hex
    answer_file, request_file = (pool_dir(run_dir) / f"{name}{suffix}" for suffix in (_ANSWER, _REQUEST))
    replace_file(request_file, msgspec.json.encode(request))
    try:
        _wait(run_dir, answer_file.exists, timeout_s, request, "an answer of the launcher")
    finally:
        request_file.unlink(missing_ok=True)
    reply = msgspec.json.decode(answer_file.read_bytes(), type=PoolReply)
    answer_file.unlink()
    if reply.name is None:
        raise _refusal(request, str(reply.error), "See `pool list RUN_DIR`.")
    return reply.name


def wait_serving(run_dir: RunDir, request: PoolRequest, name: str, timeout_s: float) -> ServerState:
    """Command: block until the server is used. Raises ConfigError if that fails or takes too long."""

    def state() -> ServerState:
        return next(server for server in read_state(run_dir) if server.name == name)

    _wait(run_dir, lambda: state().state in ("serving", "removed"), timeout_s, request, "the server to be used")
    found = state()
    if found.state == "removed":
        raise _refusal(request, "a server that gets the weights", found.trouble)
    return found


def _wait(run_dir: RunDir, found: Callable[[], bool], timeout_s: float, request: PoolRequest, what: str) -> None:
    end = time.monotonic() + timeout_s
    watch = DirectoryWatch(pool_dir(run_dir))
    try:
        while not found():
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise _refusal(request, f"{what} within {timeout_s:g} s", "Is the run still running?")
            watch.wait(left_s)
    finally:
        watch.close()


def _refusal(request: PoolRequest, expected: str, next_step: str) -> ConfigError:
    return ConfigError(f"pool {request.action}", request.server, expected, next_step)


def main(argv: list[str]) -> int:
    """List, add or remove servers; return 0."""
    args = _parser().parse_args(argv)
    run = find_run(args.run_dir)
    if args.action == "list":
        for server in read_state(run.run_dir):
            version = "-" if server.version is None else server.version
            trouble = f" ({server.trouble})" if server.trouble else ""
            print(f"{server.name}  {server.url}  {server.state}  version {version}  starts {server.starts}{trouble}")
        return 0
    if not run.is_running:
        raise ConfigError("run directory", str(run.run_dir.root), "a run that is running now", "Start it first.")
    request = PoolRequest(args.action, args.server)
    name = ask(run.run_dir, request, _ANSWER_TIMEOUT_S)
    if args.action == "remove":
        print(f"{name} ({args.server}) gets no more rollouts and no more weights")
        return 0
    print(f"{name} ({args.server}) joins")
    state = wait_serving(run.run_dir, request, name, args.timeout)
    print(f"{name} serves with version {state.version}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("pool"),
        description="Servers of a running run. `add` admits a server that is already up and was started with the same "
        "PIPELINERL_SERVER_TOKEN as the launcher. It gets the weights between two updates, its log-probs are compared, "
        "then it gets rollouts. `remove` gives it no more rollouts; running ones finish there, or are repeated on "
        "another server if the launcher started this one.",
        epilog="A server by hand: PIPELINERL_SERVER_TOKEN=... python -m pipelinerl.inference.main --model PATH "
        "--port N [--transport nccl]. Exit code 2: refused, with the reason.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    parsers = {
        name: actions.add_parser(name, help=text)
        for name, text in (("list", "all servers"), ("add", "admit a server"), ("remove", "remove a server"))
    }
    parsers["add"].add_argument("server", metavar="URL", help="http://HOST:PORT of a server")
    parsers["add"].add_argument("--timeout", type=float, default=900.0, help="seconds to wait until it serves (900)")
    parsers["remove"].add_argument("server", metavar="URL", help="its URL or name")
    for each in parsers.values():
        each.add_argument("run_dir", help="output_dir of the run")
    return parser
