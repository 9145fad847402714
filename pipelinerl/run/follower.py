"""`launch` on a node above 0: join node 0, start this node's jobs, end with the run.

Node 0 may start later: the call is repeated until it answers or the deadline has passed. There is no event for that.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from pipelinerl import __version__
from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, PipelineRLError, UserError
from pipelinerl.role import LOG_FORMAT, NODE_SECRET_KEY
from pipelinerl.run.nodes import Ended, Hello, NodeLink, Peers, Plan, Refused, node_secret, receive, send
from pipelinerl.run.preflight import Start, check_node
from pipelinerl.run.processes import Event, Interrupted, Outcome, signals_as_events
from pipelinerl.run.session import supervise_jobs
from pipelinerl.run.start import build_commands, server_sockets
from pipelinerl.run.watch import RunSession
from pipelinerl.rundir.identity import RunIdentity, read_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub
from pipelinerl.world import DEFAULT_MASTER_PORT, Cluster, WorldMap, busy_ports

_RETRY_S = 0.5
_SLICE_S = 1.0
_CONNECT_TIMEOUT_S = 10.0


def follow(config: RunConfig, cluster: Cluster, search_dirs: Sequence[Path]) -> int:
    """Run this node's part of the run that node 0 plans; the exit code is the run's.

    Args:
        config: as composed here; only what is needed to find node 0 is used, the rest comes from node 0.
        cluster: as this node sees it.
        search_dirs: folders with the user's own modules.
    """
    hello = Hello(
        rank=cluster.rank,
        world_size=cluster.world_size,
        version=__version__,
        gpus=list(cluster.gpus),
        cores=cluster.cores,
        busy_ports=busy_ports(config, cluster.master_port or DEFAULT_MASTER_PORT),
    )
    signals: SimpleQueue[Any] = SimpleQueue()
    place, timeout_s = (cluster.hosts[0], config.world.node_port), config.supervise.nodes_timeout_s
    with signals_as_events(signals):
        connection, plan = join(place, node_secret(os.environ), hello, timeout_s, signals)
    events: SimpleQueue[Event] = SimpleQueue()
    with signals_as_events(events):
        peers = Peers(cluster.rank, [NodeLink(connection, 0, cluster.hosts[0], events, config.supervise)])
        outcome = Outcome("failed", "its launcher failed", EXIT_RUN_FAILED)
        try:
            outcome = _supervise(plan, cluster, search_dirs, events, peers)
        except PipelineRLError as error:
            code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_FAILED
            outcome = Outcome("failed", str(error), code)
            raise
        finally:
            peers.end(outcome)
    _say(f"node {cluster.rank}: {outcome.status}" + (f": {outcome.reason}" if outcome.reason else ""))
    return outcome.exit_code


def join(
    place: tuple[str, int], secret: bytes, hello: Hello, timeout_s: float, signals: SimpleQueue[Interrupted]
) -> tuple[Connection, Plan]:
    """Block until node 0, listening at `place` (host, port), has sent the plan. An `Interrupted` on `signals` ends it.

    Raises:
        UserError: it did not in `timeout_s` seconds, or it refused this node.
        ConfigError: the secrets differ.
        KeyboardInterrupt: the launcher got a signal, whose number is its argument.
    """
    where = f"{place[0]}:{place[1]}"
    _say(f"node {hello.rank}: waiting for node 0 at {where} (at most {timeout_s:.0f} s)")
    deadline = time.monotonic() + timeout_s
    connection = _call(place, deadline, signals)
    # Node 0 speaks first; another service that waits for us to speak would hold this node for ever.
    while not connection.poll(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
        _raise_if_interrupted(signals, 0.0)
        if time.monotonic() > deadline:
            raise UserError(f"what listens at {where} says nothing: is that node 0, and is world.node_port its port?")
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except AuthenticationError as error:
        raise ConfigError(
            NODE_SECRET_KEY, "another value than on node 0", "the same on every node", "Export it again on all nodes."
        ) from error
    except (EOFError, OSError) as error:
        raise UserError(f"node 0 closed the connection while the secret was checked ({error})") from error
    send(connection, hello)
    _say(f"node {hello.rank}: joined, waiting for the plan")
    return connection, _await_plan(connection, deadline, signals)


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


def _await_plan(connection: Connection, deadline: float, signals: SimpleQueue[Interrupted]) -> Plan:
    """The plan comes when the last node has joined and node 0 has checked the user's code."""
    while time.monotonic() < deadline:
        try:
            message = receive(connection, _SLICE_S)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise UserError("node 0 ended before the run began; its terminal says why") from error
        if isinstance(message, Plan):
            return message
        if isinstance(message, (Refused, Ended)):
            raise UserError(f"node 0 refused this node: {message.reason}")
        _raise_if_interrupted(signals, 0.0)
    raise UserError("node 0 sent no plan in time: not all nodes joined it")


def _raise_if_interrupted(signals: SimpleQueue[Interrupted], wait_s: float) -> None:
    try:
        raise KeyboardInterrupt(signals.get(timeout=wait_s).signum)
    except Empty:
        return


def _supervise(
    plan: Plan, cluster: Cluster, search_dirs: Sequence[Path], events: SimpleQueue[Event], peers: Peers
) -> Outcome:
    run_dir = RunDir(Path(plan.run_dir))
    identity = _shared_identity(run_dir, plan)
    config = load_config(run_dir.config_file)
    world = msgspec.structs.replace(WorldMap.from_json(run_dir.world_file.read_bytes()), rank=cluster.rank)
    check_node(Start(config, cluster, os.environ))
    log = run_dir.root / f"launch_node_{cluster.rank}.log"
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=log)
    commands = build_commands(world, run_dir, os.environ, search_dirs)
    _say(f"node {cluster.rank}: starting {len(commands)} processes of run {plan.run_id} in {run_dir.root}")
    with server_sockets(os.environ) as environ:
        session = RunSession(config, world, run_dir, identity, commands, environ, plan.token, events)
        return supervise_jobs(session, StreamHub(config.streams, run_dir, identity.run_id, environ), peers)


def _shared_identity(run_dir: RunDir, plan: Plan) -> RunIdentity:
    """The identity that node 0 wrote; a node that cannot see it would write its streams where nobody reads them."""
    identity = read_identity(run_dir.identity_file) if run_dir.identity_file.exists() else None
    if identity is None or (identity.run_id, identity.incarnation) != (plan.run_id, plan.incarnation):
        found = "nothing there" if identity is None else f"run {identity.run_id}, start {identity.incarnation}"
        raise ConfigError(
            "output_dir",
            f"{run_dir.root} ({found})",
            f"run {plan.run_id}, start {plan.incarnation}, which node 0 wrote there",
            "Put output_dir on a file system that all nodes share, under the same path.",
        )
    return identity


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
