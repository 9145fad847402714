"""Which nodes of a Ray cluster a run takes, and what ends the wait for them: Ray itself is a fake here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError, UserError, WorkerError
from pipelinerl.run import bring_up, ray_nodes
from pipelinerl.run.node_agent import write_outcome
from pipelinerl.run.processes import ChildExited, Interrupted, Outcome
from pipelinerl.run.ray_nodes import EarlierNodes
from pipelinerl.world import ClusterMember, ClusterNode

MACHINE = ClusterNode("127.0.0.1", (), 1)


def config_of(**supervise: Any) -> RunConfig:
    world = {"cluster": "ray", "node_port": supervise.pop("node_port", 29400)}
    return RunConfig.model_validate({"output_dir": "x", "world": world, "supervise": supervise})


class FakeRay:
    """A cluster of nodes `a`, `b`, ... as Ray describes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
        self.living = set(names)
        self.names = names
        self.groups: list[int] = []  # nodes of each
        context = SimpleNamespace(get_node_id=lambda: names[0])
        ray = SimpleNamespace(nodes=self.nodes, get_runtime_context=lambda: context)
        for name, value in {
            "ray": ray,
            "placement_group": self.reserve,
            "remove_placement_group": lambda group: None,
        }.items():
            monkeypatch.setattr(ray_nodes, name, value)

    def nodes(self) -> list[dict[str, Any]]:
        more = {"Resources": {"CPU": 4.0}, "Labels": {}}
        return [{"NodeID": n, "NodeManagerAddress": n, "Alive": n in self.living, **more} for n in self.names]

    def reserve(self, bundles: list[Any], strategy: str) -> Any:
        """The first one stays pending: node b is gone."""
        self.groups.append(len(bundles))
        if len(self.groups) > 1:
            return SimpleNamespace(wait=lambda timeout_seconds: True)
        self.living.discard("b")
        return SimpleNamespace(wait=lambda timeout_seconds: False)


def chosen_nodes(earlier: EarlierNodes, timeout_s: float = 0.0) -> str:
    deadline = time.monotonic() + timeout_s
    found = ray_nodes._await_nodes(config_of(), None, earlier, SimpleQueue(), deadline)
    return "".join(node["NodeID"] for node in found)


def test_a_node_that_fell_silent_is_left_out_until_ray_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, "abc")
    now = time.monotonic()
    assert chosen_nodes(EarlierNodes()) == "abc"
    assert chosen_nodes(EarlierNodes(silent_at={"b": now})) == "ac"
    assert chosen_nodes(EarlierNodes(silent_at={"b": now - 70})) == "abc"


def test_a_resume_waits_for_as_many_nodes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay(monkeypatch, "abc")
    cluster.living.discard("c")
    with pytest.raises(UserError, match="2 node"):
        chosen_nodes(EarlierNodes(num_nodes=3))
    threading.Timer(0.2, cluster.living.add, "c").start()
    assert chosen_nodes(EarlierNodes(num_nodes=3), timeout_s=20) == "abc"


def test_nodes_are_chosen_again_if_one_goes_before_it_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay(monkeypatch, "abc")
    with ray_nodes._reserved(config_of(), None, EarlierNodes(), SimpleQueue(), time.monotonic() + 20) as (chosen, _):
        assert [node["NodeID"] for node in chosen] == ["a", "c"] and cluster.groups == [3, 2]


@pytest.mark.parametrize(
    ("event", "error"), [(ChildExited("ray", 1), WorkerError), (Interrupted(15), KeyboardInterrupt)]
)
def test_a_head_that_is_gone_is_not_waited_for(event: Any, error: type[BaseException]) -> None:
    """Ray answers nothing then."""
    signals, ends = SimpleQueue[Any](), threading.Event()
    threading.Timer(0.1, signals.put, [event]).start()
    started = time.monotonic()
    with pytest.raises(error):
        ray_nodes._answer(ends.wait, signals)
    ends.set()
    assert time.monotonic() - started < 20


def test_what_ray_raises_reaches_the_launcher() -> None:
    def ask() -> None:
        raise ValueError("no such node")

    with pytest.raises(ValueError, match="no such node"):
        ray_nodes._answer(ask, SimpleQueue())
    assert ray_nodes._answer(lambda: 7, SimpleQueue()) == 7


def test_nodes_leave_at_the_same_time() -> None:
    together = threading.Barrier(3)
    left: list[Outcome | None] = []

    def leave(outcome: Outcome | None) -> None:
        together.wait(20)
        left.append(outcome)

    nodes: Any = [SimpleNamespace(leave=leave)] * 3
    ray_nodes._let_go(nodes, None)
    assert left == [None] * 3


def test_the_head_has_a_port_of_its_own_and_no_memory_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of another run would be joined; Ray's monitor would kill the agent and with it the jobs of its node."""
    environs: list[dict[str, str]] = []

    def spawn(name: str, argv: Any, environ: dict[str, str], *rest: Any, **more: Any) -> Any:
        environs.append(environ)
        return SimpleNamespace(pid=2**22, is_alive=True)

    monkeypatch.setattr(bring_up, "spawn", spawn)
    monkeypatch.setattr(bring_up, "_await_port", lambda *arguments: "127.0.0.1")
    member, events = ClusterMember(2, 0), SimpleQueue[Any]()
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = config_of(node_port=other.getsockname()[1])
        with pytest.raises(ConfigError) as caught, bring_up.ray_here(config, member, MACHINE, events):
            pass
    assert caught.value.key == "world.node_port" and environs == []
    with bring_up.ray_here(config, member, MACHINE, events):
        assert environs[0]["RAY_memory_monitor_refresh_ms"] == "0"


def test_a_node_ends_once_its_agent_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the jobs of the node shared is ended by then, and the outcome says how the run went."""

    @contextmanager
    def here(*arguments: Any) -> Iterator[Any]:
        yield SimpleNamespace(head="h:1", address="h", folder=tmp_path, child=None)

    monkeypatch.setattr(bring_up, "ray_here", here)
    begun = tmp_path / "begun"
    begun.touch()
    write_outcome(tmp_path, Outcome("failed", "why", 1))
    threading.Timer(0.3, begun.unlink).start()
    assert bring_up.serve_node(config_of(heartbeat_interval_s=0.05), ClusterMember(2, 1), MACHINE) == 1
    assert not begun.exists()
