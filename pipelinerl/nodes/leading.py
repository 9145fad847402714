"""What `launch` on node 0 adds for the other nodes: wait for them, hand them the plan, tell them the end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue

from pipelinerl.config import RunConfig
from pipelinerl.nodes.leader import Leader
from pipelinerl.nodes.messages import Ended, Hello, Plan
from pipelinerl.nodes.secret import node_secret
from pipelinerl.supervise.process import Event, NodeEnded
from pipelinerl.supervise.signals import signals_as_events
from pipelinerl.supervise.supervisor import Outcome
from pipelinerl.world import Cluster

logger = logging.getLogger(__name__)


class OtherNodes:
    """The nodes above 0 of a run; without any, all methods do nothing."""

    def __init__(self, leader: Leader | None, hellos: Mapping[int, Hello]) -> None:
        self._leader = leader
        self.busy_ports = {rank: hello.busy_ports for rank, hello in hellos.items()}

    def start(self, plan: Plan, events: SimpleQueue[Event]) -> None:
        """Let them start their jobs; the end of one of them comes as an event."""
        if self._leader is None:
            return

        def heard(rank: int, ended: Ended) -> None:
            if ended.status == "completed":
                logger.info("node %d has done its part", rank)
                return
            reason = None if ended.reason is None else f"node {rank}: {ended.reason}"
            events.put(NodeEnded(ended.status, reason, ended.exit_code))

        self._leader.send_plan(plan, heard)

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


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
