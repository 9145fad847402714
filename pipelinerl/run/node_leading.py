"""What `launch` on node 0 adds for the other nodes: wait for them, hand them the plan, tell them the end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue

from pipelinerl.config import RunConfig
from pipelinerl.run.last_save import OtherLaunchers
from pipelinerl.run.node_leader import Leader
from pipelinerl.run.node_messages import Ended, Hello, Plan, Saved, Stopping
from pipelinerl.run.node_secret import node_secret
from pipelinerl.run.processes import Event, NodeEnded, NodeSaved, signals_as_events
from pipelinerl.run.supervisor import Outcome
from pipelinerl.world import Cluster

logger = logging.getLogger(__name__)


class OtherNodes:
    """The nodes above 0 of a run; without any, all methods do nothing."""

    def __init__(self, leader: Leader | None, hellos: Mapping[int, Hello]) -> None:
        self._leader = leader
        self.busy_ports = {rank: hello.busy_ports for rank, hello in hellos.items()}
        #: For the supervisor of this node.
        self.launchers = OtherLaunchers(frozenset(hellos), self._stop)

    def start(self, plan: Plan, events: SimpleQueue[Event]) -> None:
        """Let them start their jobs; the end of one of them comes as an event."""
        if self._leader is None:
            return

        def heard(rank: int, ended: Ended) -> None:
            if ended.status == "completed":
                logger.info("node %d has done its part", rank)
            else:
                events.put(NodeEnded(ended.status, said_by(f"node {rank}", ended.reason), ended.exit_code))
            events.put(NodeSaved(rank))

        def heard_stop(rank: int, message: Stopping | Saved) -> None:
            events.put(stop_event(message, rank, f"node {rank}"))

        self._leader.send_plan(plan, heard, heard_stop)

    def _stop(self, outcome: Outcome) -> None:
        if self._leader is not None and outcome.status == "interrupted":
            self._leader.stop(Stopping(outcome.reason, outcome.exit_code))

    def end(self, outcome: Outcome) -> None:
        """Tell them how the run ended."""
        if self._leader is not None:
            self._leader.end(Ended(outcome.status, outcome.reason, outcome.exit_code))


@contextmanager
def other_nodes(config: RunConfig, cluster: Cluster) -> Iterator[OtherNodes]:
    """Wait until all other nodes have joined; they are let go at the end.

    Raises:
        UserError: one did not come in time or does not fit.
    """
    if cluster.world_size == 1:
        yield OtherNodes(None, {})
        return
    supervise = config.supervise
    with Leader(
        cluster,
        config.world.node_port,
        node_secret(os.environ),
        supervise.heartbeat_interval_s,
        supervise.heartbeat_timeout_s,
    ) as leader:
        with signals_as_events(leader.arrivals):
            hellos = leader.gather(supervise.nodes_timeout_s, _say)
        yield OtherNodes(leader, hellos)


def stop_event(message: Stopping | Saved, rank: int, peer: str) -> NodeEnded | NodeSaved:
    """What the supervisor makes of it. A run that is asked to stop on one node is stopped on all."""
    if isinstance(message, Saved):
        return NodeSaved(rank)
    return NodeEnded("interrupted", said_by(peer, message.reason), message.exit_code)


def said_by(peer: str, reason: str | None) -> str | None:
    return None if reason is None else f"{peer}: {reason}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
