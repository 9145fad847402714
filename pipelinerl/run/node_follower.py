"""The side of the nodes above 0: finds node 0, offers itself and gets the plan. Used by the launcher.

Node 0 may start later: the call is repeated until it answers or the deadline has passed. There is no event for that.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue

import msgspec

from pipelinerl.errors import ConfigError, UserError
from pipelinerl.role import NODE_SECRET_KEY
from pipelinerl.run.node_link import receive, send
from pipelinerl.run.node_messages import Ended, Hello, Plan, Refused
from pipelinerl.run.processes import Interrupted

_RETRY_S = 0.5
_SLICE_S = 1.0
_CONNECT_TIMEOUT_S = 10.0


def join(
    host: str,
    port: int,
    secret: bytes,
    hello: Hello,
    timeout_s: float,
    say: Callable[[str], object],
    signals: SimpleQueue[Interrupted],
) -> tuple[Connection, Plan]:
    """Block until node 0 at `host:port` has sent the plan. An `Interrupted` on `signals` ends it.

    Raises:
        UserError: it did not in `timeout_s` seconds, or it refused this node.
        ConfigError: the secrets differ.
        KeyboardInterrupt: the launcher got a signal, whose number is its argument.
    """
    say(f"node {hello.rank}: waiting for node 0 at {host}:{port} (at most {timeout_s:.0f} s)")
    deadline = time.monotonic() + timeout_s
    connection = _call(host, port, deadline, signals)
    _await_challenge(connection, f"{host}:{port}", deadline, signals)
    _authenticate(connection, secret)
    send(connection, hello)
    say(f"node {hello.rank}: joined, waiting for the plan")
    return connection, _await_plan(connection, deadline, signals)


def _call(host: str, port: int, deadline: float, signals: SimpleQueue[Interrupted]) -> Connection:
    while True:
        try:
            return Connection(_connect(host, port).detach())
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node 0 does not answer at {host}:{port} ({error}). Start it with RANK=0, and check MASTER_ADDR, "
                    "world.node_port and the network between the nodes."
                ) from error
        _raise_if_interrupted(signals, _RETRY_S)


def _connect(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    connected.settimeout(None)
    return connected


def _await_challenge(connection: Connection, where: str, deadline: float, signals: SimpleQueue[Interrupted]) -> None:
    """Node 0 speaks first; another service that waits for us to speak would hold this node for ever."""
    while not connection.poll(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
        _raise_if_interrupted(signals, 0.0)
        if time.monotonic() > deadline:
            raise UserError(f"what listens at {where} says nothing: is that node 0, and is world.node_port its port?")


def _authenticate(connection: Connection, secret: bytes) -> None:
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except AuthenticationError as error:
        raise ConfigError(
            NODE_SECRET_KEY, "another value than on node 0", "the same on every node", "Export it again on all nodes."
        ) from error
    except (EOFError, OSError) as error:
        raise UserError(f"node 0 closed the connection while the secret was checked ({error})") from error


def _await_plan(connection: Connection, deadline: float, signals: SimpleQueue[Interrupted]) -> Plan:
    """The plan comes when the last node has joined and node 0 has checked the user's code."""
    while time.monotonic() < deadline:
        try:
            message = receive(connection, _SLICE_S)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise UserError("node 0 ended before the run began; its terminal says why") from error
        if isinstance(message, Plan):
            return message
        if isinstance(message, (Refused, Ended)):
            raise UserError(f"node 0 refused this node: {message.reason}")
        _raise_if_interrupted(signals, 0.0)
    raise UserError("node 0 sent no plan in time: not all nodes joined it")


def _raise_if_interrupted(signals: SimpleQueue[Interrupted], wait_s: float) -> None:
    try:
        interrupted = signals.get(timeout=wait_s)
    except Empty:
        return
    raise KeyboardInterrupt(interrupted.signum)
