"""`launch` on a node above 0: join node 0, start this node's jobs, end with the run. Called by the launcher's main."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from pipelinerl import __version__
from pipelinerl.config import RunConfig
from pipelinerl.config.load import load_config
from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, PipelineRLError, UserError
from pipelinerl.placement.cluster import DEFAULT_MASTER_PORT
from pipelinerl.role import LOG_FORMAT
from pipelinerl.run.last_save import OtherLaunchers
from pipelinerl.run.node_follower import join
from pipelinerl.run.node_leading import said_by, stop_event
from pipelinerl.run.node_link import NodeLink
from pipelinerl.run.node_messages import Ended, Hello, Plan, Saved, Stopping
from pipelinerl.run.node_secret import node_secret
from pipelinerl.run.node_session import supervise_node
from pipelinerl.run.ports import busy_ports
from pipelinerl.run.preflight import Start, check_node
from pipelinerl.run.processes import Event, NodeEnded, NodeSaved, signals_as_events
from pipelinerl.run.start import build_commands
from pipelinerl.run.supervisor import Outcome
from pipelinerl.rundir.identity import RunIdentity, read_identity
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Cluster, WorldMap

logger = logging.getLogger(__name__)


def follow(config: RunConfig, cluster: Cluster, search_dirs: Sequence[Path]) -> int:
    """Run this node's part of the run that node 0 plans; the exit code is the run's.

    Args:
        config: as composed here; only what is needed to find node 0 is used, the rest comes from node 0.
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
    with signals_as_events(signals):
        connection, plan = join(
            cluster.hosts[0],
            config.world.node_port,
            node_secret(os.environ),
            hello,
            config.supervise.nodes_timeout_s,
            _say,
            signals,
        )
    return _run(plan, connection, config.supervise, cluster, search_dirs)


def _run(
    plan: Plan, connection: Connection, supervise: SuperviseConfig, cluster: Cluster, search_dirs: Sequence[Path]
) -> int:
    events: SimpleQueue[Event] = SimpleQueue()
    leader = f"node 0 ({cluster.hosts[0]})"
    with signals_as_events(events):
        link = NodeLink(
            connection,
            leader,
            lambda ended: _hear_end(events, leader, ended),
            supervise.heartbeat_interval_s,
            supervise.heartbeat_timeout_s,
            lambda message: events.put(stop_event(message, 0, leader)),
        ).start()
        ended = Ended("failed", f"the launcher of node {cluster.rank} failed", EXIT_RUN_FAILED)
        try:
            node_0 = OtherLaunchers(frozenset({0}), lambda known: _tell(link, known), lambda: link.tell(Saved()))
            outcome = _supervise(plan, cluster, search_dirs, events, node_0)
            ended = _ended(outcome)
        except PipelineRLError as error:
            code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_FAILED
            ended = Ended("failed", str(error), code)
            raise
        finally:
            link.end(ended)
    _say(f"node {cluster.rank}: {outcome.status}" + (f": {outcome.reason}" if outcome.reason else ""))
    return outcome.exit_code


def _supervise(
    plan: Plan,
    cluster: Cluster,
    search_dirs: Sequence[Path],
    events: SimpleQueue[Event],
    node_0: OtherLaunchers,
) -> Outcome:
    run_dir = RunDir(Path(plan.run_dir))
    identity = _shared_identity(run_dir, plan)
    config = load_config(run_dir.config_file)
    world = msgspec.structs.replace(WorldMap.from_json(run_dir.world_file.read_bytes()), rank=cluster.rank)
    check_node(Start(config, cluster, os.environ))
    logging.basicConfig(
        level=logging.INFO, format=LOG_FORMAT, filename=run_dir.root / f"launch_node_{cluster.rank}.log"
    )
    commands = build_commands(world, run_dir, os.environ, search_dirs)
    _say(f"node {cluster.rank}: starting {len(commands)} processes of run {plan.run_id} in {run_dir.root}")
    return supervise_node(config, run_dir, identity, commands, os.environ, plan.token, events, node_0)


def _shared_identity(run_dir: RunDir, plan: Plan) -> RunIdentity:
    """The identity that node 0 wrote; a node that cannot see it would write its streams where nobody reads them."""
    expected = (plan.run_id, plan.incarnation)
    identity = read_identity(run_dir.identity_file) if run_dir.identity_file.exists() else None
    if identity is None or (identity.run_id, identity.incarnation) != expected:
        found = "nothing there" if identity is None else f"run {identity.run_id}, start {identity.incarnation}"
        raise ConfigError(
            "output_dir",
            f"{run_dir.root} ({found})",
            f"run {plan.run_id}, start {plan.incarnation}, which node 0 wrote there",
            "Put output_dir on a file system that all nodes share, under the same path.",
        )
    return identity


def _ended(outcome: Outcome) -> Ended:
    return Ended(outcome.status, outcome.reason, outcome.exit_code)


def _tell(link: NodeLink, outcome: Outcome) -> None:
    """Node 0 should not wait for the processes to be gone. Behind a signal it says itself when the run is over."""
    if outcome.status == "interrupted":
        link.tell(Stopping(outcome.reason, outcome.exit_code))
    else:
        link.tell_end(_ended(outcome))


def _hear_end(events: SimpleQueue[Event], leader: str, ended: Ended) -> None:
    events.put(NodeEnded(ended.status, said_by(leader, ended.reason), ended.exit_code))
    events.put(NodeSaved(0))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
