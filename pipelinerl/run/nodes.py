"""The launchers of a run over several nodes: what they say to each other, and the link between two of them.

Node 0 answers each `Hello` with the `Plan` once all nodes have joined (`join.py`). From then on both sides send
`Beat`s, and the first `Ended` of either side ends the run on all nodes. After a signal both sides say `Stopping` first;
the nodes above 0 then say `Saved` and continue until node 0 says `Ended`, because trainers of other nodes may need
their servers. Messages are msgspec JSON over an authenticated connection; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Literal

import msgspec

from pipelinerl.config.resources import SuperviseConfig
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError
from pipelinerl.role import NODE_SECRET_KEY
from pipelinerl.run.processes import Event, NodeEnded, NodeSaved, Outcome
from pipelinerl.world import is_slurm_step

logger = logging.getLogger(__name__)
#: How long a peer may take to read the end.
LAST_WORD_S = 5.0
_MAX_BYTES = 1 << 20
_MIN_SECRET_CHARACTERS = 16


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node offers itself. `busy_ports` are those of the scanned ranges that it cannot bind."""

    rank: int
    world_size: int
    version: str
    gpus: list[str]
    busy_ports: list[int]


class Plan(msgspec.Struct, frozen=True, tag=True):
    """Where the plan is: the run directory, on a file system that all nodes share. `token` opens the servers."""

    run_dir: str
    run_id: str
    incarnation: int
    token: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The launcher lives."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The run is over on the sender's node, and has to be on all. Instead of a plan: why there is none."""

    status: Literal["completed", "failed", "interrupted"]
    reason: str | None
    exit_code: int


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """The sender's launcher got a signal: let trainers save, then end."""

    reason: str | None
    exit_code: int


class Saved(msgspec.Struct, frozen=True, tag=True):
    """No trainer of the sender's node is left to save."""


Message = Hello | Plan | Beat | Ended | Stopping | Saved


def send(connection: Connection, message: Message) -> None:
    """Send a message; a peer that is gone is noticed by whoever reads from it."""
    with contextlib.suppress(OSError, ValueError):
        connection.send_bytes(msgspec.json.encode(message))


def receive(connection: Connection, timeout_s: float) -> Message | None:
    """The next message; None if none came in time.

    Raises:
        EOFError or OSError: the peer is gone. msgspec.MsgspecError: it talks nonsense.
    """
    if not connection.poll(timeout_s):
        return None
    message: Message = msgspec.json.decode(connection.recv_bytes(_MAX_BYTES), type=Message)
    return message


def node_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that the launchers of a run share: in their environments and nowhere else.

    Raises:
        ConfigError: there is none, or it is too short.
    """
    secret = environ.get(NODE_SECRET_KEY, "")
    if len(secret) >= _MIN_SECRET_CHARACTERS:
        return secret.encode()
    next_step = f"Make one with `openssl rand -hex 16` and export {NODE_SECRET_KEY} on all nodes."
    if is_slurm_step(environ):  # whoever wrote their own script may not have meant one run over all nodes
        next_step += " `srun` started several nodes: see scripts/slurm.sbatch, or set WORLD_SIZE=1 for a run on each."
    raise ConfigError(
        NODE_SECRET_KEY,
        f"{len(secret)} characters" if secret else None,
        f"at least {_MIN_SECRET_CHARACTERS} characters, the same on every node (WORLD_SIZE is above 1)",
        next_step,
    )


class NodeLink:
    """The authenticated connection to the launcher of node `rank`, watched from both ends; what it says becomes events.

    A thread waits for the peer's messages, at most the heartbeat time-out for each; another sends beats. A peer that
    ends without a word, or falls silent (its node lost power), counts as failed. The reading thread owns the connection
    and alone closes it: a second close could hit a descriptor that somebody else has got meanwhile.
    """

    def __init__(
        self, connection: Connection, rank: int, host: str, events: SimpleQueue[Event], config: SuperviseConfig
    ) -> None:
        self.rank = rank
        self._name = f"node {rank} ({host})"
        self._connection = connection
        self._events = events
        self._config = config
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"link to {self._name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name=f"beats to {self._name}", daemon=True).start()

    def tell(self, message: Ended | Stopping | Saved) -> None:
        """Say how far the end is, if it has not come on either side yet."""
        if not self._closing.is_set():
            if isinstance(message, Ended):
                self._closing.set()
            self._send(message)

    def close(self, deadline: float) -> None:
        """Wait until the peer has read the end, at most to `deadline` (monotonic clock), and close the connection."""
        # The peer closes when it has read that. Closing first, with a beat of the peer unread, could lose it.
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._reader.is_alive():
            with self._lock:
                if not self._connection.closed:
                    with socket_of(self._connection) as double:
                        shut_down(double)  # wakes the reading thread with an end of file
            self._reader.join()

    def _send(self, message: Message) -> None:
        with self._lock:
            send(self._connection, message)

    def _beat(self) -> None:
        while not self._closing.wait(self._config.heartbeat_interval_s):
            self._send(Beat())

    def _read(self) -> None:
        ended = self._wait_for_end()
        if not self._closing.is_set():
            self._closing.set()
            if ended.status == "completed" and self.rank > 0:
                logger.info("%s has done its part", self._name)
            else:
                self._events.put(NodeEnded(ended.status, self._quote(ended.reason), ended.exit_code))
            self._events.put(NodeSaved(self.rank))
        with self._lock:
            self._connection.close()

    def _wait_for_end(self) -> Ended:
        timeout_s = self._config.heartbeat_timeout_s
        while True:
            try:
                message = receive(self._connection, timeout_s)
            except (EOFError, OSError):
                return Ended("failed", "is gone: its launcher ended without a word", EXIT_RUN_FAILED)
            except msgspec.MsgspecError as error:
                return Ended("failed", f"sent something that is not a message: {error}", EXIT_RUN_FAILED)
            if message is None:
                return Ended("failed", f"sent no sign of life for {timeout_s:.0f} s", EXIT_RUN_FAILED)
            if isinstance(message, Ended):
                return message
            if isinstance(message, Saved) and not self._closing.is_set():
                self._events.put(NodeSaved(self.rank))
            elif isinstance(message, Stopping) and not self._closing.is_set():
                # A run that is asked to stop on one node is stopped on all.
                self._events.put(NodeEnded("interrupted", self._quote(message.reason), message.exit_code))

    def _quote(self, reason: str | None) -> str | None:
        return None if reason is None else f"{self._name}: {reason}"


class Peers:
    """The launchers of the other nodes: on node 0 all others, on the others node 0. None on a run on one node.

    Args:
        own_rank: of this node.
        links: to the others.
    """

    def __init__(self, own_rank: int = 0, links: Sequence[NodeLink] = ()) -> None:
        self._own_rank = own_rank
        self._links = links

    @property
    def ranks(self) -> set[int]:
        return {link.rank for link in self._links}

    def tell_outcome(self, outcome: Outcome) -> None:
        """As soon as it is known: the other nodes should not wait until the processes of this one are gone. After a
        signal, and on node 0, the run is over later."""
        for link in self._links:
            if outcome.status == "interrupted":
                link.tell(Stopping(outcome.reason, outcome.exit_code))
            elif self._own_rank > 0:
                link.tell(Ended(outcome.status, outcome.reason, outcome.exit_code))

    def tell_saved(self) -> None:
        """No trainer of this node is left to save. Node 0 says when the run is over instead."""
        if self._own_rank > 0:
            for link in self._links:
                link.tell(Saved())

    def end(self, outcome: Outcome) -> None:
        """Tell how the run ended and close the links. May be called twice; the first outcome counts."""
        for link in self._links:
            link.tell(Ended(outcome.status, outcome.reason, outcome.exit_code))
        deadline = time.monotonic() + LAST_WORD_S
        for link in self._links:
            link.close(deadline)


def socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
