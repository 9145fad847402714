"""The launchers of several nodes find each other over real sockets, refuse strangers, and learn of each other's end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from typing import Any

import pytest
from fakes.ports import free_port

import pipelinerl.run.join as join_module
import pipelinerl.run.nodes as nodes_module
from pipelinerl import __version__
from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError, UserError
from pipelinerl.run.join import Leader, join
from pipelinerl.run.nodes import Hello, NodeLink, Peers, Plan, node_secret, send
from pipelinerl.run.processes import Event, Interrupted, NodeEnded, NodeSaved, Outcome
from pipelinerl.world import Cluster

SECRET = b"a secret of sixteen bytes or more"
PLAN = Plan("/shared/run", "run-1", 0, "token")
WAIT_S = 120.0
# Of a peer that is to be given up; others have to be heard of sooner, also on a machine that stands still for seconds.
SILENT_S = 2.0


def cluster(world_size: int = 2, gpus: tuple[str, ...] = ()) -> Cluster:
    hosts = tuple(f"127.0.0.{index + 1}" for index in range(world_size))
    return Cluster(world_size, 0, hosts[0], None, hosts, gpus, 2)


def hello(rank: int = 1, **changes: Any) -> Hello:
    fields = {"world_size": 2, "version": __version__, "gpus": [], "busy_ports": [8080]}
    return Hello(rank=rank, **{**fields, **changes})


class Joining:
    """A node that joins in a thread."""

    def __init__(self, port: int, said: Hello, secret: bytes = SECRET, timeout_s: float = WAIT_S) -> None:
        self.error: BaseException | None = None
        self.plan: Plan | None = None
        self.connection: Connection | None = None
        self._call = (port, secret, said, timeout_s)
        self.thread = threading.Thread(target=self._join, daemon=True)
        self.thread.start()

    def _join(self) -> None:
        port, secret, said, timeout_s = self._call
        try:
            self.connection, self.plan = join(("127.0.0.1", port), secret, said, timeout_s, SimpleQueue())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def done(self) -> Joining:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self


@pytest.fixture
def port() -> int:
    return free_port()


def run_config(port: int, timeout_s: float = WAIT_S, silent_s: float = WAIT_S) -> RunConfig:
    supervise = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": silent_s, "nodes_timeout_s": timeout_s}
    return RunConfig.model_validate({"output_dir": "x", "world": {"node_port": port}, "supervise": supervise})


def new_leader(port: int, world_size: int = 2, **timeouts: float) -> Leader:
    return Leader(run_config(port, **timeouts), cluster(world_size), SECRET)


@pytest.fixture
def leader(port: int) -> Iterator[Leader]:
    with new_leader(port) as leader:
        yield leader


def gathered(leader: Leader) -> dict[int, list[int]]:
    leader.gather()
    return leader.busy_ports


def said_hello(port: int, said: Hello) -> Connection:
    """The connection of a node that has said who it is, and waits for the plan."""
    connection = Client(("127.0.0.1", port), authkey=SECRET)
    send(connection, said)
    return connection


def test_nodes_join_before_or_after_the_leader_and_get_the_plan(port: int) -> None:
    early = Joining(port, hello(1, world_size=3))
    with new_leader(port, 3) as leader:
        late = Joining(port, hello(2, world_size=3, busy_ports=[9000]))
        assert gathered(leader) == {1: [8080], 2: [9000]}
        peers = leader.send_plan(PLAN, SimpleQueue())
        assert early.done().plan == late.done().plan == PLAN and peers.ranks == {1, 2}
        for node in (early, late):
            assert node.connection is not None
            node.connection.close()


STOPPED = Outcome("interrupted", "stopped by SIGTERM", 143)


class TwoNodes:
    """Node 1 has the plan; events of both sides."""

    def __init__(self, leader: Leader, port: int) -> None:
        node = Joining(port, hello())
        leader.gather()
        self.at_leader: SimpleQueue[Event] = SimpleQueue()
        self.at_node: SimpleQueue[Event] = SimpleQueue()
        self.leader_peers = leader.send_plan(PLAN, self.at_leader)
        connection = node.done().connection
        assert connection is not None
        self.connection = connection

    def linked(self) -> Peers:
        return Peers(1, [NodeLink(self.connection, 0, "127.0.0.1", self.at_node, run_config(2000).supervise)])


def test_x7_a_failure_on_a_node_reaches_the_leader_at_once(leader: Leader, port: int) -> None:
    nodes = TwoNodes(leader, port)
    peers = nodes.linked()
    peers.tell_outcome(Outcome("failed", "finetune_1 was killed by SIGKILL", 1))
    ended = nodes.at_leader.get(timeout=WAIT_S)
    assert ended == NodeEnded("failed", "node 1 (127.0.0.2): finetune_1 was killed by SIGKILL", 1)
    assert nodes.at_leader.get(timeout=WAIT_S) == NodeSaved(1)
    peers.end(Outcome("completed", None, 0))  # the first word counts
    assert nodes.at_leader.empty()


def test_a_node_that_has_done_its_part_does_not_end_the_run(leader: Leader, port: int) -> None:
    nodes = TwoNodes(leader, port)
    nodes.linked().end(Outcome("completed", None, 0))
    assert nodes.at_leader.get(timeout=WAIT_S) == NodeSaved(1) and nodes.at_leader.empty()


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_the_leaders_end_reaches_the_node(leader: Leader, port: int, status: Any) -> None:
    nodes = TwoNodes(leader, port)
    nodes.linked()
    outcome = Outcome(status, None, 0)
    nodes.leader_peers.tell_outcome(outcome)  # other nodes may be needed until its processes are gone
    nodes.leader_peers.end(outcome)
    assert nodes.at_node.get(timeout=WAIT_S) == NodeEnded(status, None, 0)
    assert nodes.at_leader.empty()


def test_after_a_signal_both_sides_talk_until_node_0_ends_the_run(leader: Leader, port: int) -> None:
    nodes = TwoNodes(leader, port)
    peers = nodes.linked()
    peers.tell_outcome(STOPPED)
    peers.tell_saved()
    heard = [nodes.at_leader.get(timeout=WAIT_S) for _ in range(2)]
    assert heard == [NodeEnded("interrupted", "node 1 (127.0.0.2): stopped by SIGTERM", 143), NodeSaved(1)]
    nodes.leader_peers.tell_outcome(STOPPED)
    nodes.leader_peers.tell_saved()  # node 0 says when the run is over instead
    stopped = NodeEnded("interrupted", "node 0 (127.0.0.1): stopped by SIGTERM", 143)
    assert nodes.at_node.get(timeout=WAIT_S) == stopped
    nodes.leader_peers.end(STOPPED)
    assert [nodes.at_node.get(timeout=WAIT_S) for _ in range(2)] == [stopped, NodeSaved(0)]
    peers.tell_saved()  # too late: nobody hears it, and nothing breaks
    assert nodes.at_leader.empty() and nodes.at_node.empty()


def test_l9_a_launcher_that_dies_without_a_word_is_noticed(leader: Leader, port: int) -> None:
    nodes = TwoNodes(leader, port)
    nodes.connection.close()  # what the kernel does for a process that was killed
    ended = nodes.at_leader.get(timeout=WAIT_S)
    assert isinstance(ended, NodeEnded) and ended.status == "failed" and "node 1 (127.0.0.2)" in str(ended.reason)


def test_a_silent_peer_counts_as_gone_and_a_beating_one_does_not(port: int) -> None:
    with new_leader(port, 3, silent_s=SILENT_S) as leader:
        nodes = [Joining(port, hello(rank, world_size=3)) for rank in (1, 2)]
        leader.gather()
        events: SimpleQueue[Event] = SimpleQueue()
        leader.send_plan(PLAN, events)
        connection, hangs = (node.done().connection for node in nodes)
        assert connection is not None and hangs is not None
        at_node: SimpleQueue[Event] = SimpleQueue()
        beating = NodeLink(connection, 0, "127.0.0.1", at_node, run_config(port, silent_s=SILENT_S).supervise)
        ended = events.get(timeout=WAIT_S)  # node 2 neither beats nor closes
        assert isinstance(ended, NodeEnded) and "node 2" in str(ended.reason)
        assert events.get(timeout=WAIT_S) == NodeSaved(2)
        beating._reader.join(1)  # by now longer than the time-out: both sides beat, so nobody gives up
        assert at_node.empty() and events.empty()


def test_a_node_without_the_secret_is_told_and_does_not_disturb(leader: Leader, port: int) -> None:
    stranger = Joining(port, hello(), secret=b"another secret of many bytes").done()
    assert isinstance(stranger.error, ConfigError) and "PIPELINERL_NODE_SECRET" in str(stranger.error)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET / HTTP/1.0\r\n\r\n")
        node = Joining(port, hello())
        assert gathered(leader) == {1: [8080]}
        leader.send_plan(PLAN, SimpleQueue())
        assert node.done().plan == PLAN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.0.1"}, "node 1 has pipelinerl 0.0.1"),
        ({"world_size": 3}, "node 1 has WORLD_SIZE=3, node 0 has 2"),
        ({"gpus": ["0", "1"]}, "node 1 has the GPUs 0,1, node 0 has none"),
        ({"rank": 0}, "two launchers have RANK=0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_on_both_sides(
    leader: Leader, port: int, changes: dict[str, Any], message: str
) -> None:
    node = Joining(port, hello(**changes))
    with pytest.raises(UserError, match=message):
        leader.gather()
    assert message in str(node.done().error)


def test_missing_nodes_and_a_missing_leader_are_named(port: int) -> None:
    with new_leader(port, timeout_s=0.05) as leader, pytest.raises(UserError, match=f"127.0.0.1:{port}"):
        leader.gather()
    alone = Joining(free_port(), hello(), timeout_s=0.05).done()
    assert isinstance(alone.error, UserError) and "127.0.0.1" in str(alone.error)


def test_a_signal_ends_both_waits(leader: Leader, port: int) -> None:
    """With its number, which the launcher's exit code has to say."""
    leader.arrivals.put(Interrupted(15))
    with pytest.raises(KeyboardInterrupt) as at_leader:
        leader.gather()
    signals: SimpleQueue[Any] = SimpleQueue()
    signals.put(Interrupted(15))
    with pytest.raises(KeyboardInterrupt) as at_node:
        join(("127.0.0.1", free_port()), SECRET, hello(), WAIT_S, signals)
    assert (at_leader.value.args, at_node.value.args) == ((15,), (15,))


def test_a_node_that_died_before_the_plan_may_join_again(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(join_module, "say", said.put)
    monkeypatch.setattr(nodes_module, "LAST_WORD_S", 0.1)  # nobody answers

    def wait_for(*lines: str) -> None:
        assert [said.get(timeout=WAIT_S)[: len(line)] for line in lines] == list(lines)

    with new_leader(port, 3) as leader:
        thread = threading.Thread(target=leader.gather, daemon=True)
        thread.start()
        wait_for("waiting for nodes 1, 2")
        died = said_hello(port, hello(1, world_size=3))
        wait_for("node 1 joined", "waiting for node 2")
        died.close()  # what the kernel does for a process that was killed
        other = said_hello(port, hello(2, world_size=3))
        wait_for("node 1 is gone", "node 2 joined", "waiting for node 1")
        last = Joining(port, hello(1, world_size=3, busy_ports=[9000]))
        thread.join(WAIT_S)
        assert leader.busy_ports[1] == [9000]
        leader.send_plan(PLAN, SimpleQueue())
        assert last.done().plan == PLAN
        other.close()


def test_two_living_launchers_of_one_rank_are_refused(port: int) -> None:
    with new_leader(port, 3) as leader:
        first, second = (said_hello(port, hello(1, world_size=3)) for _ in range(2))
        with pytest.raises(UserError, match="RANK=1"):
            leader.gather()
        first.close()
        second.close()


@pytest.mark.parametrize("first_bytes", [b"", b"\x00\x00\x00\x20half"], ids=["silent", "slow"])
def test_a_stranger_is_turned_away_after_the_handshake_deadline(
    leader: Leader, port: int, monkeypatch: pytest.MonkeyPatch, first_bytes: bytes
) -> None:
    monkeypatch.setattr(join_module, "HANDSHAKE_S", 0.2)
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
        stranger.sendall(first_bytes)
        while stranger.recv(4096):  # the challenge, then the end
            pass
    for thread in threading.enumerate():
        if thread.name.endswith("(_greet)"):
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_a_service_that_says_nothing_is_not_waited_for_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        alone = Joining(port, hello(), timeout_s=0.05).done()
        assert isinstance(alone.error, UserError) and f"127.0.0.1:{port}" in str(alone.error)
        signals: SimpleQueue[Any] = SimpleQueue()
        signals.put(Interrupted(2))
        with pytest.raises(KeyboardInterrupt):
            join(("127.0.0.1", port), SECRET, hello(), WAIT_S, signals)


def test_a_taken_port_is_a_user_error(leader: Leader, port: int) -> None:
    with pytest.raises(ConfigError, match=r"world\.node_port"), new_leader(port):
        pass


def test_the_secret_must_be_there_and_long_enough() -> None:
    assert node_secret({"PIPELINERL_NODE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    for environ in ({}, {"PIPELINERL_NODE_SECRET": "short"}):
        with pytest.raises(ConfigError, match="16") as caught:
            node_secret(environ)
        assert "short" not in str(caught.value)
