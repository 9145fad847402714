"""Node 0's side of a run over several nodes: wait until all others have joined, then send them the plan.

A thread accepts connections and one for each checks the secret, so that a stranger who says nothing holds nobody up; it
is turned away after `HANDSHAKE_S`. A node that dies while it waits for the plan is missing again, and may be started
again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import msgspec

from pipelinerl import __version__
from pipelinerl.config import RunConfig
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError, UserError
from pipelinerl.run.nodes import Hello, NodeLink, Peers, Plan, Refused, node_secret, receive, send
from pipelinerl.run.processes import Event, Interrupted, Outcome, signals_as_events
from pipelinerl.world import Cluster

logger = logging.getLogger(__name__)
#: From the first byte to the hello.
HANDSHAKE_S = 10.0
# A node that waits for the plan says nothing: whether its machine still exists, the kernel asks this often.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class _Joined(msgspec.Struct, frozen=True):
    hello: Hello
    connection: Any


class Leader:
    """Context manager: listens from entering on; leaving closes every connection. On a run on one node, does nothing.

    Args:
        config: of the run.
        cluster: as node 0 sees it.
        secret: what the other nodes have to know.

    Attributes:
        arrivals: what `gather` waits on; the launcher puts its signals here.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, secret: bytes) -> None:
        self._config = config
        self._cluster = cluster
        self._secret = secret
        self.arrivals: SimpleQueue[Any] = SimpleQueue()
        self._nodes: dict[int, _Joined] = {}
        self._peers = Peers()
        self._listener: socket.socket | None = None

    @property
    def _place(self) -> str:
        return f"{self._cluster.hosts[0]}:{self._config.world.node_port}"

    def __enter__(self) -> Leader:
        if self._cluster.world_size == 1:
            return self
        host = self._cluster.hosts[0]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, self._config.world.node_port), family=family, backlog=64)
        except OSError as error:
            raise ConfigError(
                "world.node_port",
                self._place,
                f"a free port of this machine, at an address of its own ({error.strerror or error})",
                "Choose another world.node_port on all nodes, or correct the address of node 0.",
            ) from error
        threading.Thread(target=self._accept, args=(self._listener,), name="nodes", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the accepting thread; closing does not
            self._listener.close()
        self._peers.end(Outcome("failed", f"failed: {error}" if error else "ended", EXIT_RUN_FAILED))
        for node in self._nodes.values():
            node.connection.close()

    def gather(self) -> None:
        """Block until all nodes have joined.

        Raises:
            UserError: not all came in `supervise.nodes_timeout_s`, or one cannot be used.
            KeyboardInterrupt: the launcher got a signal, whose number is its argument.
        """
        missing = everyone = frozenset(range(1, self._cluster.world_size))
        timeout_s = self._config.supervise.nodes_timeout_s
        deadline = time.monotonic() + timeout_s
        if missing:
            _say(f"waiting for {_nodes(missing)} at {self._place} (at most {timeout_s:.0f} s)")
        while missing:
            try:
                arrival = self.arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise UserError(
                    f"{_nodes(missing)} did not join at {self._place} within {timeout_s:.0f} s. Start the same command "
                    f"there with RANK set, WORLD_SIZE={self._cluster.world_size} and the same secret."
                ) from None
            if isinstance(arrival, Interrupted):
                raise KeyboardInterrupt(arrival.signum)
            self._forget_dead()
            if _is_gone(arrival.connection):
                arrival.connection.close()
                continue
            self._admit(arrival)
            missing = everyone - self._nodes.keys()
            _say(f"node {arrival.hello.rank} joined" + (f"; waiting for {_nodes(missing)}" if missing else ""))
            self._forget_dead()
            missing = everyone - self._nodes.keys()

    @property
    def busy_ports(self) -> dict[int, list[int]]:
        """What the nodes cannot bind, by rank."""
        return {rank: node.hello.busy_ports for rank, node in self._nodes.items()}

    def send_plan(self, plan: Plan, events: SimpleQueue[Event]) -> Peers:
        """Let the nodes start their jobs. What they say from now on becomes events."""
        nodes, self._nodes = self._nodes, {}
        links = []
        for rank, node in sorted(nodes.items()):
            send(node.connection, plan)
            host = self._cluster.hosts[rank]
            links.append(NodeLink(node.connection, rank, host, events, self._config.supervise))
        self._peers = Peers(0, links)
        return self._peers

    def _admit(self, arrival: _Joined) -> None:
        trouble = self._trouble_with(arrival.hello)
        if trouble is not None:
            send(arrival.connection, Refused(trouble))
            raise UserError(trouble)
        self._nodes[arrival.hello.rank] = arrival

    def _forget_dead(self) -> None:
        """Free the places of nodes that joined and whose launcher has ended since."""
        for rank in [rank for rank, node in self._nodes.items() if _is_gone(node.connection)]:
            self._nodes.pop(rank).connection.close()
            _say(f"node {rank} is gone again")

    def _trouble_with(self, hello: Hello) -> str | None:
        """Why the node cannot be used: the plan assumes that all nodes are alike."""
        name = f"node {hello.rank}"
        if hello.version != __version__:
            return f"{name} has pipelinerl {hello.version}, node 0 has {__version__}. Install the same on all nodes."
        if hello.world_size != self._cluster.world_size:
            return f"{name} has WORLD_SIZE={hello.world_size}, node 0 has {self._cluster.world_size}."
        if not 0 < hello.rank < self._cluster.world_size or hello.rank in self._nodes:
            return f"two launchers have RANK={hello.rank}. Give every node a RANK of its own."
        if tuple(hello.gpus) != self._cluster.gpus:
            own = ",".join(self._cluster.gpus) or "none"
            return (
                f"{name} has the GPUs {','.join(hello.gpus) or 'none'}, node 0 has {own}. The nodes of a run must be "
                "alike: set CUDA_VISIBLE_DEVICES to the same list on all."
            )
        return None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, address = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(accepted, address), daemon=True).start()

    def _greet(self, accepted: socket.socket, address: Any) -> None:
        connection = Connection(os.dup(accepted.fileno()))
        # Ends whatever read of the handshake still waits then.
        timer = threading.Timer(HANDSHAKE_S, _shut_down, (accepted,))
        timer.daemon = True
        timer.start()
        try:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            hello = receive(connection, HANDSHAKE_S)
        except (AuthenticationError, EOFError, OSError, msgspec.MsgspecError) as error:
            logger.warning("a caller from %s was turned away: %s", address, error or type(error).__name__)
            connection.close()
            return
        finally:
            timer.cancel()
            timer.join()
            accepted.close()
        if isinstance(hello, Hello):
            self.arrivals.put(_Joined(hello, connection))
        else:
            connection.close()


@contextmanager
def gathered_nodes(config: RunConfig, cluster: Cluster) -> Iterator[Leader]:
    """Wait until all other nodes have joined; they are let go at the end. See `Leader.gather`."""
    secret = node_secret(os.environ) if cluster.world_size > 1 else b""
    with Leader(config, cluster, secret) as leader:
        with signals_as_events(leader.arrivals):
            leader.gather()
        yield leader


def _is_gone(connection: Connection) -> bool:
    """Whether the peer has closed the connection, or its machine has. Takes nothing of what it said."""
    with socket.socket(fileno=os.dup(connection.fileno())) as double:
        try:
            return not double.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _nodes(ranks: Collection[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"node {listed}" if len(ranks) == 1 else f"nodes {listed}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
