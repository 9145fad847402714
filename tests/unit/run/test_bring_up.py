"""Which nodes of a Ray cluster a run takes, and what ends the wait for them: Ray itself is a fake here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

pytest.importorskip("ray")
from ray.exceptions import RayError

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.errors import ConfigError, UserError, WorkerError
from pipelinerl.run import bring_up, node_agent, ray_nodes
from pipelinerl.run.node_agent import NODE_FOLDER_KEY, Facts, NodeAgent, pass_signal, read_outcome
from pipelinerl.run.processes import ChildExited, Interrupted, Outcome
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.version import __version__
from pipelinerl.world import (
    Cluster,
    ClusterMember,
    ClusterNode,
    FreePorts,
    WorldMap,
    build_world_map,
    described_cluster,
)

MACHINE = ClusterNode("127.0.0.1", (), 1)


def config_of(**supervise: Any) -> RunConfig:
    world = {"cluster": "ray", "node_port": supervise.pop("node_port", 29400)}
    return RunConfig.model_validate({"output_dir": "x", "world": world, "supervise": supervise})


class FakeRay:
    """A cluster of nodes `a`, `b` and `c` as Ray describes them. `trouble`: where b turns out to be gone."""

    def __init__(self) -> None:
        self.living = set("abc")
        self.trouble = ""
        self.groups: list[int] = []  # nodes of each
        self.removed = 0
        self.gpus = dict.fromkeys("abc", 0)
        self.ranks = dict[str, str]()  # of nodes that the run brought up

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "NodeManagerAddress": name,
                "Alive": name in self.living,
                "Resources": {"CPU": 4.0, "GPU": float(self.gpus[name])},
                "Labels": {ray_nodes.RANK_LABEL: self.ranks[name]} if name in self.ranks else {},
            }
            for name in "cba"
        ]

    def agent(self, group: Any, rank: int, info: dict[str, Any], config: RunConfig) -> Any:
        gpus = tuple(map(str, range(int(info["Resources"]["GPU"]))))
        facts = Facts(__version__, ClusterNode(info["NodeID"], gpus, 4), [])
        return SimpleNamespace(describe=SimpleNamespace(remote=lambda ports: facts))

    def placement_group(self, bundles: list[Any], strategy: str) -> Any:
        self.groups.append(len(bundles))
        return SimpleNamespace(wait=lambda timeout_s: self.is_fine("reserve"))

    def remove_placement_group(self, group: Any) -> None:
        self.removed += 1

    def get(self, facts: list[Any], timeout: float) -> list[Any]:
        if not self.is_fine("agents"):
            raise RayError("no module")
        return facts

    def is_fine(self, where: str) -> bool:
        if self.trouble == where:
            self.living.discard("b")
        is_fine = self.trouble != where or len(self.groups) > 1
        return is_fine and (self.trouble != "always" or where == "reserve")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    context = SimpleNamespace(get_node_id=lambda: "a")
    ray = SimpleNamespace(nodes=fake.nodes, get=fake.get, get_runtime_context=lambda: context)
    for name in ("placement_group", "remove_placement_group"):
        monkeypatch.setattr(ray_nodes, name, getattr(fake, name))
    monkeypatch.setattr(ray_nodes, "ray", ray)
    monkeypatch.setattr(ray_nodes, "_agent", fake.agent)
    monkeypatch.setattr(ray_nodes, "RayNode", MagicMock())
    return fake


def joined(cluster: FakeRay, num_nodes: int = 1, **supervise: Any) -> str:
    """Ids of the nodes of the run."""
    chosen, *_ = ray_nodes._join(config_of(**supervise), num_nodes, False, [], threading.Event())
    return "".join(info["NodeID"] for info in chosen)


def test_a_resume_waits_for_as_many_nodes_as_before(cluster: FakeRay) -> None:
    cluster.living.discard("c")
    with pytest.raises(UserError, match="2 node"):
        joined(cluster, 3, nodes_timeout_s=0.1)
    threading.Timer(0.2, cluster.living.add, "c").start()
    assert joined(cluster, 3, nodes_timeout_s=20) == "abc"


@pytest.mark.parametrize("trouble", ["reserve", "agents"])
def test_nodes_are_chosen_again_if_one_goes_meanwhile(cluster: FakeRay, trouble: str) -> None:
    """Ray may take a minute to say that a node is gone."""
    cluster.trouble = trouble
    assert joined(cluster) == "ac" and cluster.groups == [3, 2] and cluster.removed == 1


@pytest.mark.parametrize("is_brought_up", [True, False])
@pytest.mark.parametrize("is_described", [True, False])
def test_a_dry_run_plans_for_described_nodes_as_for_those_that_come(
    cluster: FakeRay, is_brought_up: bool, is_described: bool
) -> None:
    """`world.nodes=[{gpus: 8}, {gpus: 4}]`, without a cluster and on one."""
    cluster.living, cluster.gpus = {"a", "b"}, {"a": 8, "b": 4, "c": 0}
    described = {"output_dir": "x", "world": {"nodes": [{"gpus": 8, "cores": 4}, {"gpus": 4, "cores": 4}]}}
    dry = RunConfig.model_validate(described)
    config = RunConfig.model_validate(described if is_described else {"output_dir": "x"})
    member = ClusterMember(2) if is_brought_up else ClusterMember()
    cluster.ranks = {"a": "0", "b": "1"} if is_brought_up else {}
    with ray_nodes.joined_nodes(config, member, member.world_size, SimpleQueue(), SimpleQueue()) as place:
        assert plan_of(config, place.cluster) == plan_of(dry, described_cluster(dry.world, MACHINE, ClusterMember()))


def plan_of(config: RunConfig, cluster: Cluster) -> list[tuple[str, int, list[str], int]]:
    """Node, GPUs and cores of each job."""
    with FreePorts(config, cluster.rank, reserve=False) as ports:
        jobs = build_world_map(config, cluster, ports, None).jobs
    assert {job.node_rank for job in jobs if job.gpus} == {0, 1}
    return [(job.name, job.node_rank, job.gpus, job.cores) for job in jobs]


def test_agents_that_never_start_are_not_waited_for(cluster: FakeRay) -> None:
    cluster.trouble = "always"
    with pytest.raises(UserError, match="no module"):
        joined(cluster)
    assert len(cluster.groups) == 3


@pytest.mark.parametrize(
    ("event", "error"), [(ChildExited("ray", 1), WorkerError), (Interrupted(15), KeyboardInterrupt)]
)
def test_a_head_that_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, event: Any, error: type[BaseException]
) -> None:
    """Ray answers nothing then."""
    signals, ends = SimpleQueue[Any](), threading.Event()
    monkeypatch.setattr(ray_nodes, "_join", lambda *arguments: ends.wait())
    threading.Timer(0.1, signals.put, [event]).start()
    started = time.monotonic()
    nodes = ray_nodes.joined_nodes(config_of(), ClusterMember(), 1, signals, SimpleQueue())
    with pytest.raises(error), nodes:
        pass
    ends.set()
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("what", ["remove_placement_group", "shutdown"])
def test_what_ray_raises_in_the_end_does_not_replace_the_exit_code(
    cluster: FakeRay, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("the head is gone")

    is_shutdown = what == "shutdown"
    ray: Any = ray_nodes.ray
    ray.init, ray.shutdown = MagicMock(), fail
    monkeypatch.setattr(ray_nodes, "remove_placement_group", fail)
    config, codes = config_of(), list[int]()
    nodes = ray_nodes.joined_nodes(config, ClusterMember(), 1, SimpleQueue(), SimpleQueue())
    with ray_nodes.ray_connection("h:1") if is_shutdown else nodes:
        codes.append(0)
    assert codes == [0]


def test_a_cluster_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing cluster whose head is gone: no process of this node ends, and Ray would wait for an hour."""
    ends = threading.Event()
    monkeypatch.setattr(ray_nodes, "_join", lambda *arguments: ends.wait())
    monkeypatch.setattr(ray_nodes, "_CALL_S", 0.1)
    monkeypatch.setattr(ray_nodes, "_RESERVE_S", 0.1)
    config = config_of(nodes_timeout_s=0.1)
    nodes = ray_nodes.joined_nodes(config, ClusterMember(), 1, SimpleQueue(), SimpleQueue())
    with pytest.raises(WorkerError), nodes:
        pass
    ends.set()


def test_what_ray_raises_reaches_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: Any) -> None:
        raise ValueError("no such node")

    monkeypatch.setattr(ray_nodes, "_join", ask)
    nodes = ray_nodes.joined_nodes(config_of(), ClusterMember(), 1, SimpleQueue(), SimpleQueue())
    with pytest.raises(ValueError, match="no such node"), nodes:
        pass


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


KEPT = """
import os, subprocess, sys
from pipelinerl.run.processes import kept
stays = "trap '' TERM; while :; do sleep 1; done"
words = ["sh", "-c", f'setsid sh -c "{stays}" & setsid setsid sh -c "{stays}" & echo started; {sys.argv[1]}']
keeper = subprocess.Popen(kept(words), stdout=subprocess.PIPE)
keeper.stdout.readline()
if sys.argv[1] == "wait":
    os.kill(os.getpid(), 9)
keeper.wait()
"""


@pytest.mark.parametrize("ends", ["wait", "exit 3"])
def test_o5_nothing_of_a_kept_command_outlives_it_or_who_started_it(ends: str) -> None:
    mark = f"kept-{os.getpid()}-{ends}"
    subprocess.run([sys.executable, "-c", KEPT, ends], env={**os.environ, "KEPT": mark}, timeout=60, check=False)
    deadline = time.monotonic() + 30
    while left := [each for each in psutil.process_iter() if _environ(each).get("KEPT") == mark]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _environ(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return dict(process.environ())
    return {}


@pytest.mark.parametrize("signum", [None, 15])
def test_a_signal_between_two_starts_reaches_the_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signum: int | None
) -> None:
    identity, config, run_dir = RunIdentity(run_id="run-a", incarnation=1), config_of(), RunDir(tmp_path)
    write_identity(run_dir.identity_file, identity)
    save_config(config, run_dir.config_file)
    run_dir.world_file.write_text(WorldMap([], "cpu", 2, "h", 1).to_json())
    were_there: list[bool] = []

    def local_node(*arguments: Any) -> Any:
        were_there.append((tmp_path / "signal").exists())
        return nullcontext(MagicMock())

    monkeypatch.setattr(node_agent, "local_node", local_node)
    monkeypatch.setattr(node_agent, "check_node", MagicMock())
    monkeypatch.setattr(node_agent.logging, "basicConfig", MagicMock())
    monkeypatch.setenv(NODE_FOLDER_KEY, str(tmp_path))

    def begun() -> NodeAgent:
        agent = NodeAgent("h", 0, 1, silence_s=1e6)
        assert agent.begin(1, str(tmp_path), identity, 2, "token", {}, os.getcwd()) is None
        return agent

    assert not pass_signal(tmp_path, 15)  # nobody reads it: the launcher itself ends
    first = begun()
    assert first.report(0).signum is None
    first.leave(None)
    assert signum is None or pass_signal(tmp_path, signum)
    assert begun().report(0).signum == signum
    assert were_there == [True, True], "a report reads the file once there is a node"


@pytest.mark.parametrize("close", ["ends", "raises", "hangs"])
def test_a_node_ends_with_the_outcome_that_its_agent_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, close: str
) -> None:
    @contextmanager
    def here(*arguments: Any) -> Iterator[Any]:
        yield SimpleNamespace(head="h:1", address="h", folder=tmp_path, child=None)

    monkeypatch.setattr(bring_up, "ray_here", here)
    monkeypatch.setenv(NODE_FOLDER_KEY, str(tmp_path))
    agent, seen = NodeAgent("h", 0, 1, silence_s=600), list[Any]()
    ends = threading.Event()
    if close == "raises":
        agent._stack.callback(lambda: [][0])
    if close == "hangs":
        monkeypatch.setattr(node_agent, "_CLOSE_S", 0.1)
        agent._stack.callback(ends.wait)
    agent._stack.callback(lambda: seen.append(read_outcome(tmp_path)))
    threading.Timer(0.3, agent.leave, [Outcome("failed", "why", 1)]).start()
    assert bring_up.serve_node(config_of(heartbeat_interval_s=0.05), ClusterMember(2, 1), MACHINE) == 1
    ends.set()
    assert seen == [None], "what the jobs of the node shared has ended before"
