"""The launchers of several nodes find each other over real sockets, refuse strangers, and learn of each other's end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from fakes.ports import free_port

import pipelinerl.run.node_leader as leader_module
from pipelinerl import __version__
from pipelinerl.errors import ConfigError, UserError
from pipelinerl.run.node_follower import join
from pipelinerl.run.node_leader import Leader
from pipelinerl.run.node_link import NodeLink, send
from pipelinerl.run.node_messages import Ended, Hello, Plan, Saved, Stopping
from pipelinerl.run.node_secret import node_secret
from pipelinerl.run.processes import Interrupted
from pipelinerl.world import Cluster

SECRET = b"a secret of sixteen bytes or more"
PLAN = Plan("/shared/run", "run-1", 0, "token")
WAIT_S = 120.0
# Of a peer that is to be given up; others have to be heard of sooner, also on a machine that stands still for seconds.
SILENT_S = 6.0
NODE_RUN = Path(__file__).parents[2] / "fakes" / "node_run.py"


def cluster(world_size: int = 2, gpus: tuple[str, ...] = ()) -> Cluster:
    hosts = tuple(f"127.0.0.{index + 1}" for index in range(world_size))
    return Cluster(world_size, 0, hosts[0], None, hosts, gpus, 2)


def hello(rank: int = 1, **changes: Any) -> Hello:
    fields = {"world_size": 2, "version": __version__, "gpus": [], "cores": 2, "busy_ports": [8080]}
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
            answer = join("127.0.0.1", port, secret, said, timeout_s, lambda text: None, SimpleQueue())
            self.connection, self.plan = answer
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def done(self) -> Joining:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def leader(port: int) -> Iterator[Leader]:
    with Leader(cluster(), port, SECRET, 0.05, WAIT_S) as leader:
        yield leader


def said_hello(port: int, said: Hello) -> Connection:
    """The connection of a node that has said who it is, and waits for the plan."""
    connection = Client(("127.0.0.1", port), authkey=SECRET)
    send(connection, said)
    return connection


def ends() -> tuple[SimpleQueue[Ended], Any]:
    queue: SimpleQueue[Ended] = SimpleQueue()
    return queue, queue.put


def test_nodes_join_before_or_after_the_leader_and_get_the_plan(port: int) -> None:
    early = Joining(port, hello(1, world_size=3))
    with Leader(cluster(3), port, SECRET, 0.05, WAIT_S) as leader:
        late = Joining(port, hello(2, world_size=3, busy_ports=[9000]))
        said: list[str] = []
        nodes = leader.gather(WAIT_S, said.append)
        assert {rank: node.busy_ports for rank, node in nodes.items()} == {1: [8080], 2: [9000]}
        leader.send_plan(PLAN, lambda rank, ended: None)
        assert early.done().plan == late.done().plan == PLAN
        for node in (early, late):
            assert node.connection is not None
            node.connection.close()
    assert said[0].startswith("waiting for nodes 1, 2 at 127.0.0.1:")
    assert said[-1].endswith("joined")


def joined(leader: Leader, port: int) -> tuple[Connection, SimpleQueue[tuple[int, Ended]]]:
    """A node that has the plan, and the queue of what the leader hears of ends."""
    node = Joining(port, hello())
    leader.gather(WAIT_S, lambda text: None)
    heard: SimpleQueue[tuple[int, Ended]] = SimpleQueue()
    leader.send_plan(PLAN, lambda rank, ended: heard.put((rank, ended)))
    connection = node.done().connection
    assert connection is not None
    return connection, heard


def test_an_end_on_either_side_reaches_the_other(leader: Leader, port: int) -> None:
    connection, heard = joined(leader, port)
    link = NodeLink(connection, "node 0", lambda ended: None, 0.05, WAIT_S).start()
    failed = Ended("failed", "finetune_1 was killed by SIGKILL", 1)
    link.end(failed)
    assert heard.get(timeout=WAIT_S) == (1, failed)


def test_the_leaders_end_reaches_the_node(leader: Leader, port: int) -> None:
    connection, heard = joined(leader, port)
    queue, put = ends()
    NodeLink(connection, "node 0", put, 0.05, WAIT_S).start()
    leader.end(Ended("completed", None, 0))
    assert queue.get(timeout=WAIT_S) == Ended("completed", None, 0)
    assert heard.empty()


def test_behind_a_signal_both_sides_talk_until_node_0_ends_the_run(leader: Leader, port: int) -> None:
    node = Joining(port, hello())
    leader.gather(WAIT_S, lambda text: None)
    heard: SimpleQueue[Any] = SimpleQueue()
    leader.send_plan(PLAN, lambda rank, ended: heard.put(ended), lambda rank, message: heard.put((rank, message)))
    connection = node.done().connection
    assert connection is not None
    queue, put = ends()
    stops: SimpleQueue[Any] = SimpleQueue()
    link = NodeLink(connection, "node 0", put, 0.05, 5.0, stops.put).start()
    stopping = Stopping("stopped by SIGTERM", 143)
    link.tell(stopping)
    link.tell(Saved())
    assert [heard.get(timeout=WAIT_S) for _ in range(2)] == [(1, stopping), (1, Saved())]
    leader.stop(stopping)
    assert stops.get(timeout=WAIT_S) == stopping
    over = Ended("interrupted", "stopped by SIGTERM", 143)
    leader.end(over)
    assert queue.get(timeout=WAIT_S) == over
    link.tell(Saved())  # too late: nobody hears it, and nothing breaks
    assert heard.empty() and stops.empty()


def test_l9_a_launcher_that_dies_without_a_word_is_noticed(leader: Leader, port: int) -> None:
    connection, heard = joined(leader, port)
    connection.close()  # what the kernel does for a process that was killed
    rank, ended = heard.get(timeout=WAIT_S)
    assert (rank, ended.status) == (1, "failed")
    assert ended.reason == "node 1 (127.0.0.2) is gone: its launcher ended without a word"


def test_a_silent_peer_counts_as_gone_and_a_beating_one_does_not(port: int) -> None:
    with Leader(cluster(3), port, SECRET, 0.05, SILENT_S) as leader:
        nodes = [Joining(port, hello(rank, world_size=3)) for rank in (1, 2)]
        leader.gather(WAIT_S, lambda text: None)
        heard: SimpleQueue[tuple[int, Ended]] = SimpleQueue()
        leader.send_plan(PLAN, lambda rank, ended: heard.put((rank, ended)))
        connection, hangs = (node.done().connection for node in nodes)
        assert connection is not None and hangs is not None
        queue, put = ends()
        beating = NodeLink(connection, "node 0", put, 0.05, SILENT_S).start()
        rank, ended = heard.get(timeout=WAIT_S)  # node 2 neither beats nor closes
        assert (rank, ended.reason) == (2, "node 2 (127.0.0.3) sent no sign of life for 6 s")
        beating._threads[0].join(1)  # by now longer than the time-out: both sides beat, so nobody gives up
        assert queue.empty() and heard.empty()


def test_a_node_without_the_secret_is_told_and_does_not_disturb(leader: Leader, port: int) -> None:
    stranger = Joining(port, hello(), secret=b"another secret of many bytes").done()
    assert isinstance(stranger.error, ConfigError) and "PIPELINERL_NODE_SECRET" in str(stranger.error)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET / HTTP/1.0\r\n\r\n")
        node = Joining(port, hello())
        assert set(leader.gather(WAIT_S, lambda text: None)) == {1}
        leader.send_plan(PLAN, lambda rank, ended: None)
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
        leader.gather(WAIT_S, lambda text: None)
    assert message in str(node.done().error)


def test_missing_nodes_and_a_missing_leader_are_named(leader: Leader, port: int) -> None:
    with pytest.raises(UserError, match="node 1 did not join at 127"):
        leader.gather(0.05, lambda text: None)
    alone = Joining(free_port(), hello(), timeout_s=0.05).done()
    assert isinstance(alone.error, UserError) and "node 0 does not answer at 127.0.0.1" in str(alone.error)


def test_a_signal_ends_both_waits(leader: Leader, port: int) -> None:
    """With its number, which the launcher's exit code has to say."""
    leader.arrivals.put(Interrupted(15))
    with pytest.raises(KeyboardInterrupt) as at_leader:
        leader.gather(WAIT_S, lambda text: None)
    signals: SimpleQueue[Any] = SimpleQueue()
    signals.put(Interrupted(15))
    with pytest.raises(KeyboardInterrupt) as at_node:
        join("127.0.0.1", free_port(), SECRET, hello(), WAIT_S, lambda text: None, signals)
    assert (at_leader.value.args, at_node.value.args) == ((15,), (15,))


def test_a_node_that_died_before_the_plan_may_join_again(port: int) -> None:
    with Leader(cluster(3), port, SECRET, 0.05, WAIT_S) as leader:
        died = said_hello(port, hello(1, world_size=3))
        said: SimpleQueue[str] = SimpleQueue()
        gathered: list[Any] = []
        thread = threading.Thread(target=lambda: gathered.append(leader.gather(WAIT_S, said.put)), daemon=True)
        thread.start()
        assert "waiting for nodes 1, 2" in said.get(timeout=WAIT_S)
        assert said.get(timeout=WAIT_S) == "node 1 joined; waiting for node 2"
        died.close()  # what the kernel does for a process that was killed
        other = said_hello(port, hello(2, world_size=3))
        assert said.get(timeout=WAIT_S) == "node 1 is gone again"
        assert said.get(timeout=WAIT_S) == "node 2 joined; waiting for node 1"
        again = Joining(port, hello(1, world_size=3, busy_ports=[9000]))
        assert said.get(timeout=WAIT_S) == "node 1 joined"
        thread.join(WAIT_S)
        assert gathered[0][1].busy_ports == [9000]
        leader.send_plan(PLAN, lambda rank, ended: None)
        assert again.done().plan == PLAN
        other.close()


def test_a_node_is_started_again_at_its_own_place(port: int) -> None:
    """Its first launcher died; nobody else arrived meanwhile that would have shown it."""
    with Leader(cluster(3), port, SECRET, 0.05, WAIT_S) as leader:
        said: SimpleQueue[str] = SimpleQueue()
        thread = threading.Thread(target=lambda: leader.gather(WAIT_S, said.put), daemon=True)
        thread.start()
        said.get(timeout=WAIT_S)
        first = said_hello(port, hello(1, world_size=3))
        assert said.get(timeout=WAIT_S) == "node 1 joined; waiting for node 2"
        first.close()
        second = said_hello(port, hello(1, world_size=3))
        heard = [said.get(timeout=WAIT_S) for _ in range(2)]
        assert heard == ["node 1 is gone again", "node 1 joined; waiting for node 2"]
        third = said_hello(port, hello(2, world_size=3))
        assert said.get(timeout=WAIT_S) == "node 2 joined"
        thread.join(WAIT_S)
        second.close()
        third.close()


def test_a_launcher_that_died_before_it_was_looked_at_takes_no_place(leader: Leader, port: int) -> None:
    dead = said_hello(port, hello())
    arrival = leader.arrivals.get(timeout=WAIT_S)
    dead.close()
    leader.arrivals.put(arrival)
    living = Joining(port, hello(busy_ports=[9000]))
    assert leader.gather(WAIT_S, lambda text: None)[1].busy_ports == [9000]
    leader.send_plan(PLAN, lambda rank, ended: None)
    assert living.done().plan == PLAN


def test_two_living_launchers_of_one_rank_are_refused(port: int) -> None:
    with Leader(cluster(3), port, SECRET, 0.05, WAIT_S) as leader:
        first, second = (said_hello(port, hello(1, world_size=3)) for _ in range(2))
        with pytest.raises(UserError, match="two launchers have RANK=1"):
            leader.gather(WAIT_S, lambda text: None)
        first.close()
        second.close()


@pytest.mark.parametrize("first_bytes", [b"", b"\x00\x00\x00\x20half"], ids=["silent", "slow"])
def test_a_stranger_is_turned_away_after_the_handshake_deadline(
    leader: Leader, port: int, monkeypatch: pytest.MonkeyPatch, first_bytes: bytes
) -> None:
    monkeypatch.setattr(leader_module, "HANDSHAKE_S", 0.2)
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
        assert isinstance(alone.error, UserError) and f"127.0.0.1:{port} says nothing" in str(alone.error)
        signals: SimpleQueue[Any] = SimpleQueue()
        signals.put(Interrupted(2))
        with pytest.raises(KeyboardInterrupt):
            join("127.0.0.1", port, SECRET, hello(), WAIT_S, lambda text: None, signals)


def test_servers_of_a_node_whose_ranks_are_done_live_until_node_0_ends_the_run(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, str(NODE_RUN), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "completed True\n", ended.stderr


def test_sockets_of_servers_on_other_nodes_go_with_the_run(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "VLLM_RPC_BASE_PATH"}
    command = [sys.executable, str(NODE_RUN), str(tmp_path)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "completed True\n", ended.stderr + (tmp_path / "finetune_1" / "stderr.log").read_text()
    folder = Path((tmp_path / "finetune_1" / "stdout.log").read_text().strip())
    assert folder.is_absolute() and not folder.exists()


def test_a_taken_port_is_a_user_error(leader: Leader, port: int) -> None:
    with pytest.raises(ConfigError, match=r"world\.node_port"), Leader(cluster(), port, SECRET, 1, 1):
        pass


def test_the_secret_must_be_there_and_long_enough() -> None:
    assert node_secret({"PIPELINERL_NODE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    for environ in ({}, {"PIPELINERL_NODE_SECRET": "short"}):
        with pytest.raises(ConfigError, match="at least 16 characters") as caught:
            node_secret(environ)
        assert "short" not in str(caught.value)
