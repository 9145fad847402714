"""Which servers a run has and how each of them is: what is to be started again, and what the others are told.

Used by the supervisor, which does what is decided here. Pure but for `announce`, which writes to the stream `pool`;
waits for nothing. Servers of the pool `actor` are announced: the run uses one only while it is up and has the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from pipelinerl.config.sections import SuperviseConfig
from pipelinerl.records import PoolAnswer, PoolChange, ServerReady
from pipelinerl.run.processes import describe_exit
from pipelinerl.run.restarts import RestartBudget
from pipelinerl.world import Job

logger = logging.getLogger(__name__)
#: The kind whose servers carry the policy.
POLICY_KIND = "actor_llm"
State = Literal["starting", "serving", "down", "removed"]


@dataclass
class Server:
    """One server. `is_ours`: this launcher started its process. `joined`: it came in mid run. `due`: when it is to be
    started (ours) or tried (others) again."""

    name: str
    url: str
    is_ours: bool
    is_policy: bool
    budget: RestartBudget
    since: float
    group_port: int | None = None
    state: State = "starting"
    generation: int = 0
    has_served: bool = False
    due: float | None = None
    trouble: str = ""
    version: int | None = None
    joined: bool = False


class ServerKeeper:
    """State of all servers of one start of a run.

    Args:
        jobs: the server jobs of the plan.
        config: caps and back-off.
        start_timeout_s: how long a restarted server may take until it has the weights.
        announce: writes a change to the stream `pool`.
        incarnation: of this start.
        on_change: called after every change, with this keeper.
        node_rank: of the launcher: servers of other nodes are theirs.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        config: SuperviseConfig,
        start_timeout_s: float,
        announce: Callable[[PoolChange], None],
        incarnation: int,
        now: float,
        on_change: Callable[[ServerKeeper], None] = lambda keeper: None,
        node_rank: int = 0,
    ) -> None:
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._announce = announce
        self._incarnation = incarnation
        self._on_change = on_change
        self.servers: dict[str, Server] = {}
        for job in jobs:
            is_policy, is_ours = job.kind == POLICY_KIND, job.node_rank == node_rank
            server = Server(job.name, job.url or "", is_ours, is_policy, self._budget(), now, job.weight_group_port)
            self.servers[job.name] = server
        self._on_change(self)

    def _budget(self) -> RestartBudget:
        config = self._config
        return RestartBudget(
            config.max_server_restarts, config.server_restart_backoff_s, config.server_restart_window_s
        )

    @property
    def policy_servers(self) -> list[Server]:
        """Servers of the pool `actor` that belong to the run."""
        return [server for server in self.servers.values() if server.is_policy and server.state != "removed"]

    def is_removed(self, name: str) -> bool:
        return self.servers[name].state == "removed"

    def on_exit(self, name: str, returncode: int, now: float) -> str | None:
        """The process of a server ended. None: it will be started again; else why not, completing `<job> ...`."""
        server = self.servers[name]
        reason = f"ended while the run needed it ({describe_exit(returncode)})"
        if server.trouble:
            reason = f"{server.trouble}; it was ended"
        # What ends by itself, or cannot be used, before it ever served would only do so again.
        if server.is_policy and not server.has_served and (returncode >= 0 or server.trouble):
            return reason
        delay_s = server.budget.take(now)
        if delay_s is None:
            return f"{reason}{self._cap_text(server)}"
        logger.warning("%s %s; it is started again in %.1f s", name, reason, delay_s)
        self._down(server, reason, now)
        server.due = now + delay_s
        server.trouble = ""
        self._on_change(self)
        return None

    def may_restart(self, name: str, now: float) -> bool:
        """Whether the end of this server would be followed by another start."""
        server = self.servers[name]
        return server.state != "removed" and server.budget.used(now) < server.budget.cap

    def give_up(self, name: str, trouble: str, now: float) -> None:
        """The server is about to be ended because of `trouble`, which completes `<job> ...`."""
        server = self.servers[name]
        server.trouble = server.trouble or trouble
        self._down(server, server.trouble, now)
        self._on_change(self)

    def lose(self, name: str, trouble: str, now: float) -> None:
        """A server whose process is not ours cannot be used: it is tried again, or leaves when that did not help."""
        server = self.servers[name]
        server.trouble = trouble
        delay_s = server.budget.take(now)
        if delay_s is None:
            logger.error("%s %s%s: it leaves", name, trouble, self._cap_text(server))
            server.state = "removed"
            self._tell(server, "removed", trouble, now)
        else:
            logger.warning("%s %s; it is tried again in %.1f s", name, trouble, delay_s)
            self._down(server, trouble, now)
            server.due = now + delay_s
        self._on_change(self)

    def add(self, url: str, now: float) -> Server:
        """Take in a server that is up already.

        Raises:
            ValueError: it is there already.
        """
        if any(server.url == url and server.state != "removed" for server in self.servers.values()):
            raise ValueError(f"a server that the run does not have yet; {url} is one of it")
        number = sum(server.joined for server in self.servers.values())
        server = Server(f"joined_{number}", url, False, True, self._budget(), now, joined=True)
        self.servers[server.name] = server
        self._up(server, now)
        return server

    def remove(self, server_or_url: str, now: float) -> Server:
        """Let a server go.

        Raises:
            ValueError: there is none of that name or URL, or it is the last one.
        """
        found = [server for server in self.policy_servers if server_or_url in (server.name, server.url)]
        if not found:
            names = ", ".join(f"{server.name} ({server.url})" for server in self.policy_servers)
            raise ValueError(f"a server of the run: {names}")
        if len(self.policy_servers) == 1:
            raise ValueError("another server beside it: a run needs one")
        server = found[0]
        if server.is_ours:
            # Its process ends, so what runs there cannot come to its end.
            self._down(server, "it was removed", now)
        server.state, server.due, server.trouble = "removed", None, "it was removed"
        self._tell(server, "removed", "it was removed", now)
        self._on_change(self)
        return server

    def take_due(self, now: float) -> list[Server]:
        """Servers that are to be started (ours) or tried (others) again now."""
        due = [server for server in self.servers.values() if server.due is not None and server.due <= now]
        for server in due:
            server.due = None
        return due

    def next_due_s(self, now: float) -> float | None:
        """Seconds until the next server is due; None if none is."""
        times = [server.due for server in self.servers.values() if server.due is not None]
        return max(0.0, min(times) - now) if times else None

    def started(self, name: str, now: float) -> None:
        """The process of a server was started again."""
        server = self.servers[name]
        server.generation += 1
        self._up(server, now)

    def on_answer(self, answer: PoolAnswer, now: float) -> str | None:
        """Take what the trainer says; returns why the server has to be ended, if it has to be."""
        server = self.servers.get(answer.name)
        if server is None or server.generation != answer.generation or server.state in ("down", "removed"):
            return None
        if isinstance(answer, ServerReady):
            if server.generation:
                logger.warning("%s is back with version %d", server.name, answer.version)
            server.state, server.has_served, server.since = "serving", True, now
            server.version, server.trouble = answer.version, ""
            self._on_change(self)
            return None
        return f"was dropped by the trainer: {answer.error}"

    def find_late(self, now: float) -> str | None:
        """A restarted server that has not got the weights in time."""
        for server in self.policy_servers:
            late = now - server.since > self._start_timeout_s
            if server.is_ours and server.generation and server.state == "starting" and late:
                return server.name
        return None

    def _up(self, server: Server, now: float) -> None:
        server.state, server.since, server.due = "starting", now, None
        self._tell(server, "up", "", now)
        self._on_change(self)

    def _down(self, server: Server, reason: str, now: float) -> None:
        if server.state == "down":
            return
        server.state, server.since = "down", now
        self._tell(server, "down", reason, now)

    def _cap_text(self, server: Server) -> str:
        cap = server.budget.cap
        if cap == 0:
            return ""
        return f", after {cap} restarts (supervise.max_server_restarts)"

    def _tell(self, server: Server, event: Literal["up", "down", "removed"], reason: str, now: float) -> None:
        if not server.is_policy:
            return
        self._announce(
            PoolChange(
                name=server.name,
                url=server.url,
                event=event,
                generation=server.generation,
                time=now,
                reason=reason,
                group_port=server.group_port,
                incarnation=self._incarnation,
            )
        )
