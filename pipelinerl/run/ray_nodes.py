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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
from pipelinerl.run.node_agent import Facts, NodeAgent, Report
from pipelinerl.run.processes import (
    Child,
    ChildExited,
    Event,
    Interrupted,
    NodeLost,
    Outcome,
    describe_exit,
)
from pipelinerl.run.start import Command, RunSession
from pipelinerl.version import __version__
from pipelinerl.world import DEFAULT_MASTER_PORT, Cluster, ClusterMember, scanned_ports

logger = logging.getLogger(__name__)
#: Label of a Ray node that `bring_up` started: its RANK.
RANK_LABEL = "pipelinerl-rank"
#: How long an agent may take to start or to answer a call, and to leave: an MPS daemon may take 15 s to end.
_CALL_S, _LEAVE_S = 120.0, 30.0
#: How long nodes may take to be reserved, and Ray to do what it can only do while the head lives.
_RESERVE_S, _END_S = 5.0, 5.0
_RETRY_S, _MAX_FAILURES = 0.5, 3
_CONCURRENT_CALLS = 8
#: A node, as Ray describes it.
RayInfo = dict[str, Any]


class RayNode:
    """A node of the cluster, a `Node`: what its agent does and reports.

    A thread asks for reports; ends of jobs, signals and the loss of the node become events.
    """

    def __init__(self, rank: int, host: str, agent: Any, events: SimpleQueue[Event], config: SuperviseConfig) -> None:
        self.rank = rank
        self.answers = True
        self.name = f"node {rank} ({host})"
        self._agent = agent
        self._events = events
        self._config = config
        self._children: dict[int, Child] = {}
        self._report = Report({}, {}, None)
        self._closing = threading.Event()
        threading.Thread(target=self._follow, name=f"node-{rank}", daemon=True).start()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What a method of the agent returns. Raises OSError if it fails or does not answer."""
        try:
            return ray.get(getattr(self._agent, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            raise OSError(f"{self.name}: {error.cause}") from error
        except RayError as error:
            self.answers = False
            raise OSError(f"{self.name} does not answer: {_cause(error)}") from error

    def begin(self, *args: Any) -> str | None:
        """Why the node cannot start jobs, if it says so. One that does not answer is lost."""
        try:
            trouble: str | None = self.call("begin", *args, timeout_s=_CALL_S)
        except OSError as error:
            return str(error) if self.answers else None
        return trouble and f"{self.name}: {trouble}"

    def start(self, command: Command) -> Child:
        pid, stdout, stderr = self.call("start", command, timeout_s=self._config.heartbeat_timeout_s)
        child = Child(command.job.name, pid, stdout, stderr, time.monotonic(), partial(self._signal, pid))
        self._children[pid] = child
        return child

    def look(self, child: Child) -> Sighting:
        return self._report.seen.get(child.pid, Sighting(None, 0.0))

    def end_rest(self, child: Child) -> None:
        with suppress(OSError):  # the node is gone, and the job with it
            self.call("end_rest", child.pid, timeout_s=self._config.heartbeat_timeout_s)

    def end_all(self, grace_s: float) -> list[int]:
        left: list[int] = self.call("end_all", grace_s, timeout_s=grace_s + _END_S)
        return left

    def leave(self, outcome: Outcome | None) -> None:
        """Let the node go. `outcome` is the run's, if it is over."""
        self._closing.set()
        if self.answers:
            with suppress(OSError):
                self.call("leave", outcome, timeout_s=_LEAVE_S)

    def _signal(self, pid: int, signum: int, to_group: bool) -> None:
        self._agent.signal.remote(pid, signum, to_group)

    def _follow(self) -> None:
        timeout_s, interval_s = self._config.heartbeat_timeout_s, self._config.heartbeat_interval_s
        lost_at, signum = time.monotonic() + timeout_s, None
        while not self._closing.is_set():
            left_s = lost_at - time.monotonic()
            try:
                report: Report = ray.get(self._agent.report.remote(interval_s), timeout=max(left_s, 0.1))
            except RayError as error:  # a network that is cut for a moment comes back
                self.answers = False
                is_gone = isinstance(error, ActorDiedError)
                if (is_gone or left_s <= 0) and not self._closing.is_set():
                    what = "is gone: " if is_gone else f"has sent no sign of life for {timeout_s:.0f} s: "
                    return self._events.put(NodeLost(self.rank, what + _cause(error)))
                self._closing.wait(_RETRY_S)
                continue
            lost_at, self.answers, self._report = time.monotonic() + timeout_s, True, report
            for pid, code in report.exits.items():  # of this report and all before
                if (child := self._children.pop(pid, None)) is not None:
                    child.end(code)
                    self._events.put(ChildExited(child.name, code))
            if report.signum != signum and report.signum is not None:
                signum = report.signum
                self._events.put(Interrupted(signum, self.rank))


def _cause(error: Exception) -> str:
    """What Ray says of an error, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition(" because ")[2].partition(". ")[0] for line in lines if " because " in line]
    return (told or lines or [type(error).__name__])[0]


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
        atexit.unregister(ray.shutdown)  # it would wait for a head that is gone, as here
        with suppress(Exception):  # the run is over: its exit code counts
            _in_thread(ray.shutdown).result(_END_S)


@contextmanager
def joined_nodes(
    config: RunConfig, member: ClusterMember, num_nodes: int, signals: SimpleQueue[Any], events: SimpleQueue[Event]
) -> Iterator[Place]:
    """Wait for the nodes, reserve them, and start an agent on each.

    Args:
        config: of the run; `world.nodes` describes the nodes that it needs.
        member: the place of this machine.
        num_nodes: how many nodes there have to be without such a description; an existing cluster may have more.
        signals: where an `Interrupted` ends the wait, or a `ChildExited` of Ray's processes of this node.
        events: what the nodes say goes there.

    Raises:
        UserError: not all came in `supervise.nodes_timeout_s`, or one cannot be used.
        WorkerError: Ray ended on this node, or does not answer.
        KeyboardInterrupt: the launcher got a signal, whose number is its argument.
    """
    ports = scanned_ports(config, member.master_port or DEFAULT_MASTER_PORT)
    stopped = threading.Event()
    try:
        # Ray waits for a head that is gone: this thread hears of it, and of signals.
        joining = _in_thread(partial(_join, config, num_nodes, member.world_size > 1, ports, stopped))
        joining.add_done_callback(lambda _: signals.put(None))
        deadline = time.monotonic() + config.supervise.nodes_timeout_s + _RESERVE_S + _CALL_S
        while not joining.done():
            try:
                event = signals.get(timeout=max(deadline - time.monotonic(), 0.0))
            except Empty:
                raise WorkerError(
                    "Ray does not answer; the head of its cluster may be gone. See `ray status`; start the cluster "
                    "again if it is gone, then start the same command again to resume the run."
                ) from None
            if isinstance(event, Interrupted):
                raise KeyboardInterrupt(event.signum)
            if isinstance(event, ChildExited):
                raise WorkerError(f"Ray's processes of this node ended ({describe_exit(event.returncode)}).")
        chosen, group, agents, facts = joining.result()
    finally:
        stopped.set()
    hosts = [info["NodeManagerAddress"] for info in chosen]
    nodes = [
        RayNode(rank, host, agent, events, config.supervise)
        for rank, (host, agent) in enumerate(zip(hosts, agents, strict=True))
    ]
    own = ray.get_runtime_context().get_node_id()
    place = next((rank for rank, info in enumerate(chosen) if info["NodeID"] == own), -1)
    cluster = Cluster(tuple(each.machine for each in facts), place, member.master_port)
    busy_ports = {rank: each.busy_ports for rank, each in enumerate(facts)}
    try:
        for node, each in zip(nodes, facts, strict=True):
            if each.version != __version__:
                raise UserError(
                    f"{node.name} has pipelinerl {each.version}, here it is {__version__}. Install the same."
                )
        yield Place(cluster, busy_ports, partial(_opened, nodes), True, partial(_let_go, nodes))
    finally:
        _let_go(nodes, None)
        with suppress(Exception):  # Ray removes it when the launcher ends; the run's exit code counts
            _in_thread(partial(remove_placement_group, group)).result(_END_S)


@contextmanager
def _opened(nodes: Sequence[RayNode], session: RunSession) -> Iterator[Mapping[int, Node]]:
    """Have every node check itself and make ready. Raises UserError if one cannot be used."""
    environ = {key: value for key, value in session.environ.items() if not key.startswith("RAY_")}
    order = str(session.run_dir.root), session.identity, len(nodes), session.token, environ, os.getcwd()
    with ThreadPoolExecutor(len(nodes)) as pool:
        troubles = list(pool.map(lambda node: node.begin(node.rank, *order), nodes))
    if trouble := next(filter(None, troubles), None):
        raise UserError(trouble)
    yield {node.rank: node for node in nodes}


def _let_go(nodes: Collection[RayNode], outcome: Outcome | None) -> None:
    with ThreadPoolExecutor(len(nodes)) as pool:
        for node in nodes:
            pool.submit(node.leave, outcome)


def _in_thread(ask: Callable[[], Any]) -> Future[Any]:
    """What Ray returns, once it does."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name="ask-ray", daemon=True).start()
    return answer


def _join(
    config: RunConfig, num_nodes: int, is_exact: bool, ports: list[int], stopped: threading.Event
) -> tuple[list[RayInfo], PlacementGroup, list[Any], list[Facts]]:
    """The nodes of the run by rank, reserved with all their cores and GPUs, the agents on them, and what those say.

    What a node that is gone takes with it is tried again: Ray may take a minute to find out that it is.
    """
    deadline, told, failures = time.monotonic() + config.supervise.nodes_timeout_s, "", 0
    while not stopped.is_set():
        living = sorted((info for info in ray.nodes() if info["Alive"] and _count(info, "CPU")), key=_order)
        chosen, trouble = _choose(config, num_nodes, is_exact, living)
        if chosen:
            group = placement_group([_bundle(info) for info in chosen], strategy="STRICT_SPREAD")
            trouble = "the nodes are in use by others (`ray status` shows by whom), or one is gone"
            try:
                if group.wait(_RESERVE_S):
                    agents = [_agent(group, rank, info, config) for rank, info in enumerate(chosen)]
                    facts = ray.get([agent.describe.remote(ports) for agent in agents], timeout=_CALL_S)
                    return chosen, group, agents, facts
            except RayError as error:
                trouble, failures = f"an agent does not start: {_cause(error)}", failures + 1
            remove_placement_group(group)
        if time.monotonic() > deadline or failures == _MAX_FAILURES:
            hosts = ", ".join(info["NodeManagerAddress"] for info in living) or "none"
            raise UserError(f"{trouble}, after supervise.nodes_timeout_s or several trials; nodes of Ray: {hosts}.")
        if trouble != told:
            told = trouble
            sys.stderr.write(f"waiting for nodes: {told}, at most {deadline - time.monotonic():.0f} s\n")
        stopped.wait(_RETRY_S)
    raise WorkerError("the wait for nodes was stopped")


def _choose(config: RunConfig, num_nodes: int, is_exact: bool, living: list[RayInfo]) -> tuple[list[RayInfo], str]:
    """The nodes of the run by rank; none, and why, if not all are there."""
    there = f"{len(living)} node(s)"
    if config.world.nodes is not None:
        gpus = [node.gpus for node in config.world.nodes]
        there += f", not the {len(gpus)} with {', '.join(map(str, gpus))} GPUs (world.nodes)"
        return _matching(living, gpus), there
    is_enough = len(living) == num_nodes if is_exact else len(living) >= num_nodes
    return living if is_enough else [], f"{there} of {num_nodes}"


def _matching(living: list[RayInfo], gpus: list[int]) -> list[RayInfo]:
    """For each number of GPUs a node of its own that has so many; empty: there are not enough."""
    free, found = list(living), dict[int, RayInfo]()
    for place in sorted(range(len(gpus)), key=lambda place: -gpus[place]):
        fitting = [info for info in free if _count(info, "GPU") >= gpus[place]]
        if not fitting:
            return []
        info = min(fitting, key=lambda info: _count(info, "GPU"))
        free.remove(info)
        found[place] = {**info, "Resources": {**info["Resources"], "GPU": float(gpus[place])}}
    return [found[place] for place in range(len(gpus))]


def _order(info: RayInfo) -> tuple[int, bool, str]:
    """By RANK where nodes have one, else the launcher's node first."""
    is_other = info["NodeID"] != ray.get_runtime_context().get_node_id()
    return int(info["Labels"].get(RANK_LABEL, "0")), is_other, info["NodeManagerAddress"]


def _count(info: RayInfo, resource: str) -> int:
    return int(info["Resources"].get(resource, 0))


def _bundle(info: RayInfo) -> dict[str, float]:
    counts = {name: float(_count(info, name)) for name in ("CPU", "GPU") if _count(info, name)}
    return counts | {f"node:{info['NodeManagerAddress']}": 0.001}


def _agent(group: PlacementGroup, rank: int, info: RayInfo, config: RunConfig) -> Any:
    cpus, gpus = _count(info, "CPU"), _count(info, "GPU")
    options = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "max_concurrency": _CONCURRENT_CALLS,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    }
    # Longer than the launcher's own patience: it names the node first.
    silence_s = config.supervise.heartbeat_timeout_s + 2 * config.supervise.heartbeat_interval_s
    return ray.remote(NodeAgent).options(**options).remote(info["NodeManagerAddress"], gpus, cpus, silence_s)
