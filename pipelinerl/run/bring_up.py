"""The same command on every node: it brings a Ray cluster up between them, which ends with it.

Node 0 has the head of the cluster and the launcher. The others wait for what the run comes to: their agents, which the
launcher starts, leave them the outcome in a folder, where they leave the signals that they get.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from pipelinerl.config import RunConfig
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError, UserError, WorkerError
from pipelinerl.run.last_error import last_error
from pipelinerl.run.node import FindNodes, Place
from pipelinerl.run.node_agent import NODE_FOLDER_KEY, pass_signal, read_outcome
from pipelinerl.run.processes import (
    Child,
    ChildExited,
    Event,
    Interrupted,
    become_subreaper,
    end_all,
    kept,
    signals_as_events,
    spawn,
)
from pipelinerl.run.ray_nodes import RANK_LABEL, joined_nodes, ray_connection
from pipelinerl.rundir.durable import ScratchFolder
from pipelinerl.world import ClusterMember, ClusterNode, can_bind

#: The address of this node, where it has several.
NODE_ADDRESS_KEY = "PIPELINERL_NODE_ADDRESS"
_RETRY_S, _CONNECT_S, _END_S, _HEAD_S = 0.5, 2.0, 1.0, 120.0
#: Nothing of a run is in Ray's store of objects.
_STORE_BYTES = 80_000_000
# Ray's own sockets need a short path.
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class RayHere(NamedTuple):
    """Ray's processes of this node: where the head is, its address, and the folder for messages of agents."""

    head: str
    address: str
    folder: Path
    child: Child


@contextmanager
def cluster_nodes(config: RunConfig, member: ClusterMember, machine: ClusterNode) -> Iterator[FindNodes]:
    """How the launcher finds the nodes of its runs on Ray: on the cluster that these machines bring up, or an
    existing one."""
    signals: SimpleQueue[Any] = SimpleQueue()
    here, num_nodes = None, member.world_size
    with ExitStack() as stack:
        with signals_as_events(signals):
            if member.world_size > 1:
                here = stack.enter_context(ray_here(config, member, machine, signals))
            stack.enter_context(ray_connection(here and here.head, here and here.address))

        @contextmanager
        def find(events: SimpleQueue[Event]) -> Iterator[Place]:
            nonlocal num_nodes
            if here is not None and not here.child.is_alive:
                raise WorkerError(f"the head of the Ray cluster is gone: {_last_words(here.child)}")
            with ExitStack() as nodes:
                with signals_as_events(signals):
                    place = nodes.enter_context(joined_nodes(config, member, num_nodes, signals, events))
                num_nodes = place.cluster.world_size  # a run that is resumed has as many nodes as before
                yield place

        yield find


@contextmanager
def ray_here(
    config: RunConfig, member: ClusterMember, machine: ClusterNode, events: SimpleQueue[Event]
) -> Iterator[RayHere]:
    """Ray's processes of this node; they are gone in the end. A node above 0 waits for node 0 first.

    Raises:
        ConfigError: the port is taken.
        UserError: node 0 does not answer in `supervise.nodes_timeout_s`, or Ray does not start.
        KeyboardInterrupt: a signal came.
    """
    port, supervise = config.world.node_port, config.supervise
    head = own = _resolve(member.master_addr)
    if member.rank > 0:
        sys.stderr.write(f"node {member.rank}: waiting for node 0 at {head}:{port}\n")
        own = _await_port(head, port, supervise.nodes_timeout_s, events)
    elif not can_bind(port):  # perhaps the head of another run
        next_step = "Choose another world.node_port on all nodes."
        raise ConfigError("world.node_port", port, "an unused port of this machine", next_step)
    own = os.environ.get(NODE_ADDRESS_KEY) or own
    if member.rank == 0:
        head = own
    parent = next((folder for folder in _SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), None)
    if parent is None:
        raise UserError(f"none of {', '.join(_SHORT_FOLDERS)} is writable: Ray needs a folder with a short path.")
    become_subreaper()
    with ScratchFolder("ray", parent) as folder:
        environ = {
            **os.environ,
            NODE_FOLDER_KEY: str(folder),
            "RAY_START_HOOK": f"{__name__}.{without_client_server.__name__}",
            "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills the agent, and the node, once memory is short
        }
        head_options = [f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        argv = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(["--head", *head_options] if member.rank == 0 else [f"--address={head}:{port}"]),
            *(f"--node-ip-address={own}", f"--num-gpus={len(machine.gpus)}", f"--num-cpus={machine.cores}"),
            *(f"--object-store-memory={_STORE_BYTES}", "--include-log-monitor=false"),
            *("--min-worker-port=0", "--max-worker-port=0"),  # any that is free
            *(f"--labels={RANK_LABEL}={member.rank}", f"--temp-dir={folder}"),
        ]
        child = spawn("ray", kept(argv), environ, folder, events)
        try:
            if member.rank == 0:
                _await_port(own, port, min(supervise.nodes_timeout_s, _HEAD_S), events, child)
            yield RayHere(f"{head}:{port}", own, folder, child)
        finally:
            end_all([child.pid], _END_S)


def serve_node(config: RunConfig, member: ClusterMember, machine: ClusterNode) -> int:
    """On a node above 0: be part of the cluster until the run is over. Returns its exit code."""
    events: SimpleQueue[Any] = SimpleQueue()
    name, signum, timeout_s = f"node {member.rank}", None, config.supervise.heartbeat_timeout_s
    with signals_as_events(events), ray_here(config, member, machine, events) as here:
        sys.stderr.write(f"{name}: joining node 0 at {here.head} as {here.address}\n")
        lost_at = time.monotonic() + timeout_s
        while True:
            event: Event | None = None
            with suppress(Empty):
                event = events.get(timeout=config.supervise.heartbeat_interval_s)
            if isinstance(event, Interrupted):
                if signum is not None or not pass_signal(here.folder, event.signum):
                    return 128 + event.signum
                signum = event.signum
                sys.stderr.write(f"{name}: asking the run to stop\n")
            if (outcome := read_outcome(here.folder)) is not None:
                sys.stderr.write(f"{name}: {': '.join(filter(None, (outcome.status, outcome.reason)))}\n")
                return outcome.exit_code
            with suppress(OSError):  # Ray itself would wait for minutes
                _reach(here.head.rpartition(":")[0], config.world.node_port)
                lost_at = time.monotonic() + timeout_s
            if isinstance(event, ChildExited) or time.monotonic() > lost_at:
                gone = f"node 0 at {here.head} is gone, or Ray failed here: {_last_words(here.child)}"
                sys.stderr.write(f"{name}: {gone}\n")
                return EXIT_RUN_FAILED if signum is None else 128 + signum


def without_client_server(parameters: Any, head: bool) -> None:
    """Hook of `ray start`, which has no option for this: no server for clients outside of the cluster."""
    parameters.ray_client_server_port = None


def _await_port(host: str, port: int, timeout_s: float, events: SimpleQueue[Any], ray: Child | None = None) -> str:
    """Wait until the head listens; returns the address from which it is reached. `ray`: those who start it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _reach(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node 0 does not answer at {host}:{port} ({error}). Start it with RANK=0, and check MASTER_ADDR, "
                    "world.node_port and the network between the nodes."
                ) from error
        with suppress(Empty):
            event = events.get(timeout=_RETRY_S)
            if isinstance(event, Interrupted):
                raise KeyboardInterrupt(event.signum)
            if isinstance(event, ChildExited) and ray is not None:
                raise UserError(f"Ray did not start here: {_last_words(ray)}")


def _reach(host: str, port: int) -> str:
    """The own address, from which this one is reached. Raises OSError if it is not."""
    with socket.create_connection((host, port), timeout=_CONNECT_S) as probe:
        return str(probe.getsockname()[0])


def _last_words(ray: Child) -> str:
    """Why Ray ended, without the state that it prints."""
    lines = [line for line in last_error(ray.stdout, ray.stderr).splitlines() if "[state-dump]" not in line]
    return " | ".join(lines[-3:])


def _resolve(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            "MASTER_ADDR", name, f"a name or address ({error.strerror or error})", "Correct it."
        ) from error
    return str(found[0][4][0])
