"""The nodes of a Ray cluster as the launcher sees them. Ray says which nodes there are, reserves them, and starts and
watches one agent (`node_agent.py`) on each. No data and no weights go through it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import SuperviseConfig
from pipelinerl.errors import ConfigError, UserError, WorkerError
from pipelinerl.run.node import Node, Place, Sighting
from pipelinerl.run.node_agent import Facts, NodeAgent, Order, Report, Started
from pipelinerl.run.processes import (
    Child,
    ChildExited,
    Event,
    Interrupted,
    NodeLost,
    NodeSignalled,
    Outcome,
    describe_exit,
)
from pipelinerl.run.start import Command, RunSession
from pipelinerl.version import __version__
from pipelinerl.world import DEFAULT_MASTER_PORT, Cluster, ClusterMember, scanned_ports

logger = logging.getLogger(__name__)
#: Label of a Ray node that `bring_up` started: its RANK.
RANK_LABEL = "pipelinerl-rank"
_CALL_S = 120.0
_LEAVE_S = 5.0
#: An MPS daemon may take 15 s to end.
_AGENT_LEAVE_S = 20.0
#: Ray's health checks may take so long to find out that a machine is gone.
_SILENT_S = 65.0
_RETRY_S = 0.5
_CONCURRENT_CALLS = 8


class RayNode:
    """A node of the cluster, a `Node`: what its agent does and reports.

    A thread asks for reports; ends of jobs, signals and the loss of the node become events.
    """

    def __init__(self, rank: int, host: str, agent: Any, events: SimpleQueue[Event], config: SuperviseConfig) -> None:
        self.rank = rank
        self.host = host
        self.answers = True
        #: When the node was lost because it did not answer (monotonic seconds). Ray may still take it for alive.
        self.silent_at: float | None = None
        self._agent = agent
        self._events = events
        self._config = config
        self._lock = threading.Lock()
        self._children: dict[int, Child] = {}
        self._report = Report({}, {}, None)
        self._closing = threading.Event()
        threading.Thread(target=self._follow, name=f"node-{rank}", daemon=True).start()

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.host})"

    def call(self, method: str, *args: Any, timeout_s: float = _CALL_S) -> Any:
        """What a method of the agent returns. Raises OSError if it fails or does not answer."""
        try:
            return ray.get(getattr(self._agent, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            raise OSError(f"{self.name}: {error.cause}") from error
        except RayError as error:
            self.answers = False
            raise OSError(f"{self.name} does not answer: {_cause(error)}") from error

    def start(self, command: Command) -> Child:
        started: Started = self.call("start", command, timeout_s=self._config.heartbeat_timeout_s)
        child = Child(command.job.name, *started, time.monotonic(), partial(self._signal, started.pid))
        with self._lock:
            self._children[child.pid] = child
        self._settle(self._report)  # it may have ended already
        return child

    def look(self, child: Child) -> Sighting:
        return self._report.seen.get(child.pid, Sighting(None, 0.0))

    def end_rest(self, child: Child) -> None:
        with suppress(OSError):  # the node is gone, and the job with it
            self.call("end_rest", child.pid, timeout_s=self._config.heartbeat_timeout_s)

    def end_all(self, grace_s: float) -> list[int]:
        left: list[int] = self.call("end_all", grace_s, timeout_s=grace_s + _LEAVE_S)
        return left

    def leave(self, outcome: Outcome | None) -> None:
        """Let the node go. `outcome` is the run's, if it is over."""
        self._closing.set()
        if self.answers:
            with suppress(OSError):
                self.call("leave", outcome, timeout_s=_AGENT_LEAVE_S)

    def _signal(self, pid: int, signum: int, to_group: bool) -> None:
        self._agent.signal.remote(pid, signum, to_group)

    def _follow(self) -> None:
        heard_at, signum = time.monotonic(), None
        timeout_s, interval_s = self._config.heartbeat_timeout_s, self._config.heartbeat_interval_s
        while not self._closing.is_set():
            left_s = max(0.1, heard_at + timeout_s - time.monotonic())
            try:
                report: Report = ray.get(self._agent.report.remote(interval_s), timeout=left_s)
            except ActorDiedError as error:
                return self._lose(f"is gone: {_cause(error)}")
            except RayError as error:  # a network that is cut for a moment comes back
                self.answers = False
                if time.monotonic() - heard_at >= timeout_s:
                    self.silent_at = time.monotonic()
                    return self._lose(f"has sent no sign of life for {timeout_s:.0f} s ({_cause(error)})")
                self._closing.wait(_RETRY_S)
                continue
            heard_at, self.answers, self._report = time.monotonic(), True, report
            self._settle(report)
            if report.signum is not None and report.signum != signum:
                signum = report.signum
                self._events.put(NodeSignalled(self.rank, signum))

    def _settle(self, report: Report) -> None:
        with self._lock:
            ended = [(self._children.pop(pid), code) for pid, code in report.exits.items() if pid in self._children]
        for child, code in ended:
            child.end(code)
            self._events.put(ChildExited(child.name, code))

    def _lose(self, reason: str) -> None:
        self.answers = False
        if not self._closing.is_set():
            self._events.put(NodeLost(self.rank, reason))


def _cause(error: Exception) -> str:
    """What Ray says of an error, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition(" because ")[2].partition(". ")[0] for line in lines if " because " in line]
    return (told or lines or [type(error).__name__])[0]


@dataclass(frozen=True)
class RayNodes:
    """The nodes of a run on Ray, reserved and with an agent each."""

    nodes: Mapping[int, RayNode]

    @contextmanager
    def open(self, session: RunSession) -> Iterator[Mapping[int, Node]]:
        """Have every node check itself and make ready.

        Raises:
            UserError: one cannot be used, or does not answer.
        """
        environ = {key: value for key, value in session.environ.items() if not key.startswith("RAY_")}
        orders = {
            rank: Order(
                str(session.run_dir.root),
                session.identity,
                rank,
                len(self.nodes),
                session.token,
                environ,
                os.getcwd(),
                sys.executable,
            )
            for rank in self.nodes
        }
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            answers = {rank: pool.submit(node.call, "begin", orders[rank]) for rank, node in self.nodes.items()}
        for rank, answer in answers.items():
            trouble = answer.exception() or answer.result()
            if trouble:
                raise UserError(f"{self.nodes[rank].name}: {trouble}")
        yield self.nodes

    def end(self, outcome: Outcome) -> None:
        """Let the nodes know that the run is over."""
        _let_go(self.nodes.values(), outcome)


@contextmanager
def ray_connection(address: str | None, own_address: str | None = None) -> Iterator[None]:
    """The launcher as a driver of the Ray cluster at `address` (host:port); None: the one of RAY_ADDRESS, or the one
    that runs on this machine."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    options: dict[str, Any] = {} if own_address is None else {"_node_ip_address": own_address}
    try:
        ray.init(address, namespace="pipelinerl", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "RAY_ADDRESS",
            address,
            f"a Ray cluster with a node on this machine, and its token in RAY_AUTH_TOKEN ({_cause(error)})",
            "Start one (docs/nodes.md), or unset world.cluster for a run on this machine.",
        ) from error
    try:
        yield
    finally:
        if not _within(_LEAVE_S, ray.shutdown):
            atexit.unregister(ray.shutdown)  # Ray would wait again


@dataclass
class EarlierNodes:
    """What a launcher knows when it resumes a run: how many nodes the run had, and when nodes fell silent, by Ray's id
    (monotonic seconds)."""

    num_nodes: int | None = None
    silent_at: dict[str, float] = field(default_factory=dict)


@contextmanager
def joined_nodes(
    config: RunConfig,
    member: ClusterMember,
    earlier: EarlierNodes,
    signals: SimpleQueue[Any],
    events: SimpleQueue[Event],
) -> Iterator[Place]:
    """Wait for the nodes, reserve them, and start an agent on each.

    Args:
        config: of the run; `world.nodes` describes the nodes that it needs.
        member: the place of this machine; how many nodes there have to be, if they brought the cluster up.
        earlier: nodes of the run's last start; those of this one are noted there.
        signals: where an `Interrupted` ends the wait, or a `ChildExited` of Ray's processes of this node.
        events: what the nodes say goes there.

    Raises:
        UserError: not all came in `supervise.nodes_timeout_s`, or one cannot be used.
        WorkerError: Ray ended on this node.
        KeyboardInterrupt: the launcher got a signal, whose number is its argument.
    """
    deadline = time.monotonic() + config.supervise.nodes_timeout_s
    # An existing cluster may have any number of nodes.
    num_nodes = member.world_size if config.world.cluster == "auto" else None
    with _reserved(config, num_nodes, earlier, signals, deadline) as (chosen, group):
        earlier.num_nodes = len(chosen)
        nodes: dict[int, RayNode] = {}
        try:
            for rank, node in enumerate(chosen):
                nodes[rank] = RayNode(
                    rank, node["NodeManagerAddress"], _agent(group, rank, node, config), events, config.supervise
                )
            ports = scanned_ports(config, member.master_port or DEFAULT_MASTER_PORT)
            facts: dict[int, Facts] = {rank: _facts(node, ports) for rank, node in nodes.items()}
            own = ray.get_runtime_context().get_node_id()
            place = next((rank for rank, node in enumerate(chosen) if node["NodeID"] == own), -1)
            cluster = Cluster(tuple(each.machine for each in facts.values()), place, member.master_port)
            busy_ports = {rank: each.busy_ports for rank, each in facts.items()}
            found = RayNodes(nodes)
            yield Place(cluster, busy_ports, found.open, True, found.end)
        finally:
            _let_go(nodes.values(), None)
            earlier.silent_at |= {
                chosen[rank]["NodeID"]: node.silent_at for rank, node in nodes.items() if node.silent_at is not None
            }


@contextmanager
def _reserved(
    config: RunConfig, num_nodes: int | None, earlier: EarlierNodes, signals: SimpleQueue[Any], deadline: float
) -> Iterator[tuple[list[dict[str, Any]], PlacementGroup]]:
    """The nodes of the run with all their cores and GPUs, chosen again if one is gone before it is reserved."""
    while True:
        chosen = _await_nodes(config, num_nodes, earlier, signals, deadline)
        bundles = [_bundle(node) for node in chosen]
        group = _answer(partial(placement_group, bundles, strategy="STRICT_SPREAD"), signals)
        try:
            if _is_placed(group, chosen, signals, deadline):
                yield chosen, group
                return
        finally:
            _within(_LEAVE_S, partial(remove_placement_group, group))


def _let_go(nodes: Collection[RayNode], outcome: Outcome | None) -> None:
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        for node in nodes:
            pool.submit(node.leave, outcome)


def _answer(ask: Callable[[], Any], signals: SimpleQueue[Any]) -> Any:
    """What Ray returns. It waits for a head that is gone: a signal or the end of Ray here ends the wait."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)
        signals.put(None)

    threading.Thread(target=run, name="ask-ray", daemon=True).start()
    while not answer.done():
        _wait(signals, _CALL_S)
    return answer.result()


def _within(limit_s: float, do: Callable[[], object]) -> bool:
    """Whether this was done in time: Ray waits for a head that is gone."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _facts(node: RayNode, ports: list[int]) -> Facts:
    try:
        facts: Facts = node.call("describe", ports, timeout_s=_CALL_S)
    except OSError as error:
        raise UserError(f"no agent on {node.name}: {error}") from error
    if facts.version != __version__:
        raise UserError(f"{node.name} has pipelinerl {facts.version}, here it is {__version__}. Install the same.")
    return facts


def _await_nodes(
    config: RunConfig, num_nodes: int | None, earlier: EarlierNodes, signals: SimpleQueue[Any], deadline: float
) -> list[dict[str, Any]]:
    """The nodes of the run in the order of their ranks, once all are there."""
    wanted = None if config.world.nodes is None else [node.gpus for node in config.world.nodes]
    told = ""
    while True:
        silent = {name for name, at in earlier.silent_at.items() if time.monotonic() - at < _SILENT_S}
        living = [node for node in _living(signals) if node["NodeID"] not in silent and _count(node, "CPU")]
        living.sort(key=_order)
        chosen, there = living, f"{len(living)} node(s)"
        if wanted is not None:
            chosen = _matching(living, wanted)
            there += f", not the {len(wanted)} with {', '.join(map(str, wanted))} GPUs (world.nodes)"
        elif num_nodes is not None:
            ranks = [_rank(node) for node in living]
            chosen = living if ranks == list(range(num_nodes)) else []
            there += f" of {num_nodes} (RANK {', '.join(map(str, ranks))})"
        elif earlier.num_nodes is not None and len(living) < earlier.num_nodes:
            chosen, there = [], f"{there} of {earlier.num_nodes}, which the run had"
        if chosen:
            return chosen
        if there != told:
            told = there
            sys.stderr.write(f"waiting for nodes: {there}, at most {deadline - time.monotonic():.0f} s\n")
        if time.monotonic() > deadline:
            hosts = ", ".join(node["NodeManagerAddress"] for node in living) or "none"
            raise UserError(f"the Ray cluster has {there} after supervise.nodes_timeout_s: {hosts}.")
        _wait(signals, _RETRY_S)


def _matching(living: list[dict[str, Any]], gpus: list[int]) -> list[dict[str, Any]]:
    """For each number of GPUs a node of its own that has so many; empty: there are not enough."""
    free, found = list(living), dict[int, dict[str, Any]]()
    for place in sorted(range(len(gpus)), key=lambda place: -gpus[place]):
        fitting = [node for node in free if _count(node, "GPU") >= gpus[place]]
        if not fitting:
            return []
        node = min(fitting, key=lambda node: _count(node, "GPU"))
        free.remove(node)
        resources = {**node["Resources"], "GPU": float(gpus[place])}
        found[place] = {**node, "Resources": resources}
    return [found[place] for place in range(len(gpus))]


def _living(signals: SimpleQueue[Any]) -> list[dict[str, Any]]:
    return [node for node in _answer(ray.nodes, signals) if node["Alive"]]


def _is_placed(group: PlacementGroup, chosen: list[dict[str, Any]], signals: SimpleQueue[Any], deadline: float) -> bool:
    """Wait until the nodes are reserved; False if one of them turns out to be gone."""
    while not _answer(partial(group.wait, timeout_seconds=1), signals):
        living = {node["NodeID"] for node in _living(signals)}
        if not living.issuperset(node["NodeID"] for node in chosen):
            return False
        if time.monotonic() > deadline:
            raise UserError("the nodes of the Ray cluster are in use by others: `ray status` shows by whom.")
    return True


def _wait(signals: SimpleQueue[Any], wait_s: float) -> None:
    with suppress(Empty):
        event = signals.get(timeout=wait_s)
        if isinstance(event, Interrupted):
            raise KeyboardInterrupt(event.signum)
        if isinstance(event, ChildExited):
            raise WorkerError(f"Ray's processes of this node ended ({describe_exit(event.returncode)}).")


def _order(node: dict[str, Any]) -> tuple[int, bool, str]:
    """By RANK where nodes have one, else the launcher's node first."""
    is_other = node["NodeID"] != ray.get_runtime_context().get_node_id()
    return _rank(node), is_other, node["NodeManagerAddress"]


def _rank(node: dict[str, Any]) -> int:
    return int(node["Labels"].get(RANK_LABEL, "0"))


def _count(node: dict[str, Any], resource: str) -> int:
    return int(node["Resources"].get(resource, 0))


def _bundle(node: dict[str, Any]) -> dict[str, float]:
    bundle = {"CPU": float(_count(node, "CPU")), f"node:{node['NodeManagerAddress']}": 0.001}
    return bundle | ({"GPU": float(gpus)} if (gpus := _count(node, "GPU")) else {})


def _agent(group: PlacementGroup, rank: int, node: dict[str, Any], config: RunConfig) -> Any:
    cpus, gpus = _count(node, "CPU"), _count(node, "GPU")
    options = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "max_concurrency": _CONCURRENT_CALLS,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    }
    # Longer than the launcher's own patience: it names the node first.
    silence_s = config.supervise.heartbeat_timeout_s + 2 * config.supervise.heartbeat_interval_s
    return ray.remote(NodeAgent).options(**options).remote(node["NodeManagerAddress"], gpus, cpus, silence_s)
