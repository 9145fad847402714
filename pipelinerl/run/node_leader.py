"""Node 0's side: waits until all other nodes have joined, then sends them the plan. Used by the launcher.

A thread accepts connections and one for each checks the secret, so that a stranger who says nothing holds nobody up; it
is turned away after `HANDSHAKE_S`. `gather` waits on one queue, up to a deadline, and ends at a signal. A node that
dies while it waits for the plan is missing again, and may be started again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import msgspec

from pipelinerl import __version__
from pipelinerl.errors import ConfigError, UserError
from pipelinerl.run.node_link import LAST_WORD_S, NodeLink, is_gone, receive, send
from pipelinerl.run.node_messages import Ended, Hello, Plan, Refused, Saved, Stopping
from pipelinerl.run.processes import Interrupted
from pipelinerl.world import Cluster

logger = logging.getLogger(__name__)
#: From the first byte to the hello.
HANDSHAKE_S = 10.0
# A node that waits for the plan says nothing: whether its machine is there is the kernel's question, so often.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class _Joined(msgspec.Struct, frozen=True):
    hello: Hello
    connection: Any


class Leader:
    """Context manager: listens from entering on; leaving closes every connection.

    Args:
        cluster: as node 0 sees it.
        port: where the other nodes call.
        secret: what they have to know.
        interval_s, timeout_s: of the beats, once a node has joined.

    Attributes:
        arrivals: what `gather` waits on; the launcher puts its signals here.
    """

    def __init__(self, cluster: Cluster, port: int, secret: bytes, interval_s: float, timeout_s: float) -> None:
        self._cluster = cluster
        self._port = port
        self._secret = secret
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self.arrivals: SimpleQueue[Any] = SimpleQueue()
        self._nodes: dict[int, _Joined] = {}
        self._links: list[NodeLink] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Leader:
        host = self._cluster.hosts[0]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, self._port), family=family, backlog=64)
        except OSError as error:
            raise ConfigError(
                "world.node_port",
                f"{host}:{self._port}",
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
        self.end(Ended("failed", f"node 0 failed: {error}" if error else "node 0 ended", 1))
        for node in self._nodes.values():
            node.connection.close()

    def gather(self, timeout_s: float, say: Callable[[str], object]) -> Mapping[int, Hello]:
        """Block until all nodes have joined; what each of them said, by rank.

        Raises:
            UserError: not all came in `timeout_s` seconds, or one cannot be used.
            KeyboardInterrupt: the launcher got a signal, whose number is its argument.
        """
        missing = everyone = frozenset(range(1, self._cluster.world_size))
        deadline = time.monotonic() + timeout_s
        where = f"{self._cluster.hosts[0]}:{self._port}"
        say(f"waiting for {_nodes(missing)} at {where} (at most {timeout_s:.0f} s)")
        while missing:
            try:
                arrival = self.arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise UserError(
                    f"{_nodes(missing)} did not join at {where} within {timeout_s:.0f} s. Start the same command "
                    f"there with RANK set, WORLD_SIZE={self._cluster.world_size} and the same secret."
                ) from None
            if isinstance(arrival, Interrupted):
                raise KeyboardInterrupt(arrival.signum)
            self._forget_dead(say)
            if is_gone(arrival.connection):
                arrival.connection.close()
                continue
            self._admit(arrival)
            missing = everyone - self._nodes.keys()
            say(f"node {arrival.hello.rank} joined" + (f"; waiting for {_nodes(missing)}" if missing else ""))
            self._forget_dead(say)
            missing = everyone - self._nodes.keys()
        return {rank: node.hello for rank, node in self._nodes.items()}

    def send_plan(
        self,
        plan: Plan,
        on_end: Callable[[int, Ended], object],
        on_stop: Callable[[int, Stopping | Saved], object] = lambda rank, message: None,
    ) -> None:
        """Let the nodes start their jobs. `on_end(rank, ended)` is called from a thread when one of them ends, and
        `on_stop(rank, message)` for what it says on the way there behind a signal."""
        nodes, self._nodes = self._nodes, {}
        for rank, node in sorted(nodes.items()):
            send(node.connection, plan)
            peer = f"node {rank} ({self._cluster.hosts[rank]})"
            link = NodeLink(
                node.connection,
                peer,
                functools.partial(on_end, rank),
                self._interval_s,
                self._timeout_s,
                functools.partial(on_stop, rank),
            )
            self._links.append(link.start())

    def stop(self, stopping: Stopping) -> None:
        """Ask the nodes to let their trainers save."""
        for link in self._links:
            link.tell(stopping)

    def end(self, ended: Ended) -> None:
        """Tell the nodes how the run ended."""
        for link in self._links:
            link.tell_end(ended)
        deadline = time.monotonic() + LAST_WORD_S
        for link in self._links:
            link.close(deadline)

    def _admit(self, arrival: _Joined) -> None:
        trouble = self._trouble_with(arrival.hello)
        if trouble is not None:
            send(arrival.connection, Refused(trouble))
            raise UserError(trouble)
        self._nodes[arrival.hello.rank] = arrival

    def _forget_dead(self, say: Callable[[str], object]) -> None:
        """Give the places of nodes free that joined and whose launcher has ended since."""
        for rank in [rank for rank, node in self._nodes.items() if is_gone(node.connection)]:
            self._nodes.pop(rank).connection.close()
            say(f"node {rank} is gone again")

    def _trouble_with(self, hello: Hello) -> str | None:
        """Why the node cannot be used: the plan takes all nodes for alike."""
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


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _nodes(ranks: Collection[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"node {listed}" if len(ranks) == 1 else f"nodes {listed}"
