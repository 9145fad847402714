"""Where the jobs of a run are: a `Node` starts, sees, signals and ends those of one machine.

`LocalNode` does so on this machine. On a Ray cluster, an agent on each node (`node_agent.py`) has a `LocalNode`, and
the launcher talks to it through a `RayNode` (`ray_nodes.py`). Every node sees the run directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from pipelinerl.config import RunConfig
from pipelinerl.run.mps import shared_by_mps
from pipelinerl.run.processes import (
    Child,
    Event,
    Outcome,
    become_subreaper,
    cpu_seconds,
    end_all,
    end_rest_of_job,
    spawn,
)
from pipelinerl.run.start import Command, RunSession, child_environment, server_sockets
from pipelinerl.rundir.heartbeat import HeartbeatState, read_heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Cluster, Job

logger = logging.getLogger(__name__)


class Sighting(NamedTuple):
    """What can be seen of a process: its last beat, and the seconds of CPU time that it has used."""

    beat: HeartbeatState | None
    cpu_s: float


class Node(Protocol):
    """The jobs of one machine."""

    @property
    def answers(self) -> bool:
        """Whether the machine can be reached, as far as is known."""

    def start(self, command: Command) -> Child:
        """Start a job; its end becomes a `ChildExited`. Raises OSError if it cannot be started."""

    def look(self, child: Child) -> Sighting:
        """What was last seen of a living job."""

    def end_rest(self, child: Child) -> None:
        """Kill what is left of a job whose first process has ended."""

    def end_all(self, grace_s: float) -> list[int]:
        """End every process of every job, with SIGKILL after `grace_s`; the pids of those that survived even that."""


#: Makes the nodes of a run ready to start its jobs, by rank, and leaves no process on them in the end.
OpenNodes = Callable[[RunSession], AbstractContextManager[Mapping[int, Node]]]


class LocalNode:
    """The jobs of this machine.

    Args:
        run_dir: of the run.
        environ: what jobs inherit.
        token: of the servers.
        events: where the ends of jobs go.
        death_fd: read end of a pipe that closes when this process ends.
    """

    answers = True

    def __init__(
        self, run_dir: RunDir, environ: Mapping[str, str], token: str, events: SimpleQueue[Event], death_fd: int
    ) -> None:
        self._run_dir = run_dir
        self._environ = environ
        self._token = token
        self._events = events
        self._death_fd = death_fd
        self._pids: list[int] = []

    def start(self, command: Command) -> Child:
        name = command.job.name
        env = child_environment(command, self._environ, self._token, self._death_fd)
        with suppress(OSError):  # that of an earlier process
            self._run_dir.heartbeat_file(name).unlink(missing_ok=True)
        child = spawn(name, command.argv, env, self._run_dir.job(name), self._events, (self._death_fd,))
        self._pids.append(child.pid)
        return child

    def look(self, child: Child) -> Sighting:
        return Sighting(read_heartbeat(self._run_dir.heartbeat_file(child.name)), cpu_seconds(child.pid))

    def end_rest(self, child: Child) -> None:
        end_rest_of_job(child.pid, child.name)

    def end_all(self, grace_s: float) -> list[int]:
        return end_all(self._pids, grace_s)


@contextmanager
def local_node(
    config: RunConfig,
    jobs: Sequence[Job],
    run_dir: RunDir,
    environ: Mapping[str, str],
    token: str,
    events: SimpleQueue[Event],
) -> Iterator[LocalNode]:
    """This machine, ready to start these jobs. They end when this process does, however it ends."""
    if not become_subreaper():
        logger.warning("this system cannot re-parent orphans: processes that leave their group may survive the run")
    with ExitStack() as stack:
        environ = stack.enter_context(server_sockets(environ))
        environ = stack.enter_context(shared_by_mps(config, jobs, environ))
        death_read, death_write = os.pipe()
        stack.callback(os.close, death_read)
        stack.callback(os.close, death_write)
        yield LocalNode(run_dir, environ, token, events, death_read)


@contextmanager
def this_machine(session: RunSession) -> Iterator[Mapping[int, Node]]:
    """The only node of a run without a cluster."""
    jobs = [command.job for command in session.commands]
    place = session.run_dir, session.environ, session.token, session.events
    with local_node(session.config, jobs, *place) as node:
        yield {0: node}


@dataclass(frozen=True)
class Place:
    """Where a run is to be: on this machine, unless said otherwise.

    `busy_ports` are what its nodes cannot bind, by rank; `open` makes them ready to start jobs; `end` tells them how
    the run ended. `has_agents`: they check themselves.
    """

    cluster: Cluster
    busy_ports: Mapping[int, list[int]] = field(default_factory=dict)
    open: OpenNodes = this_machine
    has_agents: bool = False
    end: Callable[[Outcome], None] = lambda outcome: None


#: Waits for the nodes of a run. What they say becomes events.
FindNodes = Callable[[SimpleQueue[Event]], AbstractContextManager[Place]]
