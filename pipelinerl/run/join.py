"""How the launchers of several nodes find each other: `gathered_nodes` on node 0, `join` on the others."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, UserError
from pipelinerl.role import NODE_SECRET_KEY
from pipelinerl.run.nodes import Ended, Hello, NodeLink, Peers, Plan, node_secret, receive, send, shut_down, socket_of
from pipelinerl.run.processes import Event, Interrupted, Outcome, signals_as_events
from pipelinerl.version import __version__
from pipelinerl.world import Cluster

logger = logging.getLogger(__name__)
#: From the first byte of a caller to its hello.
HANDSHAKE_S = 10.0
_RETRY_S = 0.5
_SLICE_S = 1.0
_CONNECT_TIMEOUT_S = 10.0
# A node that waits for the plan says nothing: whether its machine still exists, the kernel asks this often.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Joined(NamedTuple):
    """A node that knows the secret and waits for the plan."""

    hello: Hello
    connection: Connection


class Leader:
    """Node 0: context manager that listens from entering on; leaving closes every connection.

    A thread accepts connections and one for each checks the secret, so that a stranger who says nothing holds nobody
    up. A node that dies while it waits for the plan is missing again, and may be started again.

    Args:
        config: of the run.
        cluster: as node 0 sees it.
        secret: what the other nodes have to know.

    Attributes:
        arrivals: what `gather` waits on; the launcher puts its signals here.
        peers: the other nodes, once they have the plan.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, secret: bytes) -> None:
        self._config = config
        self._cluster = cluster
        self._secret = secret
        self._place = f"{cluster.hosts[0]}:{config.world.node_port}"
        self._nodes: dict[int, Joined] = {}
        self._listener: socket.socket | None = None
        self.arrivals: SimpleQueue[Any] = SimpleQueue()
        self.peers = Peers()

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._listener is not None:
            shut_down(self._listener)  # ends the wait of the accepting thread; closing does not
            self._listener.close()
        self.peers.end(Outcome("failed", f"failed: {error}" if error else "ended", EXIT_RUN_FAILED))
        for node in self._nodes.values():
            node.connection.close()

    def gather(self) -> None:
        """Block until all nodes have joined.

        Raises:
            UserError: not all came in `supervise.nodes_timeout_s`, or one cannot be used.
            KeyboardInterrupt: the launcher got a signal, whose number is its argument.
        """
        timeout_s = self._config.supervise.nodes_timeout_s
        deadline = time.monotonic() + timeout_s
        while missing := self._missing():
            say(f"waiting for {missing} at {self._place} (at most {deadline - time.monotonic():.0f} s)")
            try:
                arrival = self.arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise UserError(
                    f"{missing} did not join at {self._place} within {timeout_s:.0f} s. Start the same command there "
                    f"with RANK set, WORLD_SIZE={self._cluster.world_size} and the same secret."
                ) from None
            if isinstance(arrival, Interrupted):
                raise KeyboardInterrupt(arrival.signum)
            self._forget_dead()
            if (trouble := self._trouble_with(arrival.hello)) is not None:
                send(arrival.connection, Ended("failed", trouble, EXIT_USER_ERROR))
                raise UserError(trouble)
            self._nodes[arrival.hello.rank] = arrival
            say(f"node {arrival.hello.rank} joined")

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
        self.peers = Peers(0, links)
        return self.peers

    def _missing(self) -> str:
        """The nodes that are not there; empty: none."""
        self._forget_dead()
        ranks = [str(rank) for rank in range(1, self._cluster.world_size) if rank not in self._nodes]
        return f"node{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else ""

    def _forget_dead(self) -> None:
        """Free the places of nodes that joined and whose launcher has ended since."""
        for rank in [rank for rank, node in self._nodes.items() if _is_gone(node.connection)]:
            self._nodes.pop(rank).connection.close()
            say(f"node {rank} is gone again")

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
            theirs, own = (",".join(gpus) or "none" for gpus in (hello.gpus, self._cluster.gpus))
            return f"{name} has the GPUs {theirs}, node 0 has {own}. Set CUDA_VISIBLE_DEVICES to the same on all nodes."
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
        timer = threading.Timer(HANDSHAKE_S, shut_down, (accepted,))
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
            logger.warning("a caller from %s was refused: %s", address, error or type(error).__name__)
            hello = None
        finally:
            timer.cancel()
            timer.join()
            accepted.close()
        if isinstance(hello, Hello):
            self.arrivals.put(Joined(hello, connection))
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


def join(
    place: tuple[str, int], secret: bytes, hello: Hello, timeout_s: float, signals: SimpleQueue[Interrupted]
) -> tuple[Connection, Plan]:
    """Block until node 0, listening at `place` (host, port), has sent the plan. An `Interrupted` on `signals` ends it.

    Node 0 may start later, so the call is repeated; there is no event for that.

    Raises:
        UserError: it did not in `timeout_s` seconds, or it refused this node.
        ConfigError: the secrets differ.
        KeyboardInterrupt: the launcher got a signal, whose number is its argument.
    """
    where = f"{place[0]}:{place[1]}"
    say(f"node {hello.rank}: waiting for node 0 at {where} (at most {timeout_s:.0f} s)")
    deadline = time.monotonic() + timeout_s
    connection = _call(place, deadline, signals)
    # Node 0 speaks first; another service that waits for us to speak would block this node forever.
    if not _await_word(connection, deadline, signals):
        raise UserError(f"what listens at {where} says nothing: is that node 0, and is world.node_port its port?")
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        send(connection, hello)
        say(f"node {hello.rank}: joined, waiting for the plan")
        # It comes when the last node has joined and node 0 has checked the user's code.
        if not _await_word(connection, deadline, signals):
            raise UserError("node 0 sent no plan in time: not all nodes joined it")
        answer = receive(connection, 0)
    except AuthenticationError as error:
        raise ConfigError(
            NODE_SECRET_KEY, "another value than on node 0", "the same on every node", "Export it again on all nodes."
        ) from error
    except (EOFError, OSError, msgspec.MsgspecError) as error:
        raise UserError("node 0 ended before the run began; its terminal says why") from error
    if not isinstance(answer, Plan):
        raise UserError(f"node 0 refused this node: {answer.reason if isinstance(answer, Ended) else answer}")
    return connection, answer


def _call(place: tuple[str, int], deadline: float, signals: SimpleQueue[Interrupted]) -> Connection:
    while True:
        try:
            connected = socket.create_connection(place, timeout=_CONNECT_TIMEOUT_S)
            connected.settimeout(None)
            return Connection(connected.detach())
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node 0 does not answer at {place[0]}:{place[1]} ({error}). Start it with RANK=0, and check "
                    "MASTER_ADDR, world.node_port and the network between the nodes."
                ) from error
        _raise_if_interrupted(signals, _RETRY_S)


def _await_word(connection: Connection, deadline: float, signals: SimpleQueue[Interrupted]) -> bool:
    """Whether the peer says something, or closes, before the deadline."""
    while not connection.poll(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
        _raise_if_interrupted(signals, 0.0)
        if time.monotonic() > deadline:
            return False
    return True


def _raise_if_interrupted(signals: SimpleQueue[Interrupted], wait_s: float) -> None:
    with contextlib.suppress(Empty):
        raise KeyboardInterrupt(signals.get(timeout=wait_s).signum)


def _is_gone(connection: Connection) -> bool:
    """Whether the peer has closed the connection, or its machine has. Takes nothing of what it said."""
    with socket_of(connection) as double:
        try:
            return not double.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def say(*lines: str) -> None:
    """Tell the user at the terminal."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
