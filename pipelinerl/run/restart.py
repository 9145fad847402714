"""What the exit of a process means: which exit fails the run, which server is restarted in place, when the whole run is
resumed. Decisions only; the supervisor starts and ends processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipelinerl.config.resources import SuperviseConfig
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR
from pipelinerl.records import PoolAnswer, PoolChange, ServerReady, TrainerMessage, TrainingDone, record_time
from pipelinerl.run.pool_command import ServerState, write_state
from pipelinerl.run.processes import Outcome, describe_exit
from pipelinerl.run.start import RunSession
from pipelinerl.streams.base import StreamReader, StreamWriter
from pipelinerl.world import SERVER_KINDS, Job

logger = logging.getLogger(__name__)
#: The kind whose servers carry the policy.
POLICY_KIND = "actor_llm"
#: Jobs whose exit ends the run, which can then be resumed.
RESUMED_KINDS = ("finetune", "actor", "preprocessor")
MAX_BACKOFF_S = 60.0
_WINDOW_S = 3600.0
#: After training: how long the actor's own exit may take to be noticed, and the trainer's last message about a server
#: that was just restarted.
END_S = 1.0
ANSWER_S = 20.0
_REPEAT = (
    "The trainer, the only source of weights for a new server, has finished and saved the model. Start the same "
    "command again: it repeats the evaluation"
)

Phase = Literal["training", "evaluating", "over"]


def can_resume(outcome: Outcome) -> bool:
    """Whether a run with this outcome may be resumed automatically. A user error would only happen again, and a server
    has already been restarted as often as allowed."""
    kind = (outcome.job or "").rpartition("_")[0]
    is_resumed = outcome.has_lost_node or kind in RESUMED_KINDS
    return outcome.status == "failed" and outcome.exit_code == EXIT_RUN_FAILED and is_resumed


class ExitVerdict(NamedTuple):
    """What the exit of a job means for the run; `reason` completes `<job> ...`."""

    kind: Literal["continue", "finished", "failed", "user_error"]
    reason: str = ""


@dataclass
class ExitPolicy:
    """Judges the exits of jobs.

    Trainer ranks, actor and preprocessor exit with code 0 once training is complete. Servers never exit by themselves;
    `ServerKeeper` decides whether they are restarted. Every other exit fails the run.

    Args:
        jobs: of the run.
        trainer: messages of the trainer; None: the run has no trainer, and its stages know when they are done.
        incarnation: of this start.
    """

    jobs: Sequence[Job]
    trainer: StreamReader[TrainerMessage] | None
    incarnation: int = 0
    _done: set[str] = field(default_factory=set)
    _is_trained: bool = False

    @property
    def unfinished(self) -> list[str]:
        """Jobs that have yet to exit by themselves."""
        return [job.name for job in self.jobs if job.kind not in SERVER_KINDS and job.name not in self._done]

    @property
    def has_finished_jobs(self) -> bool:
        return bool(self._done)

    @property
    def phase(self) -> Phase:
        """`evaluating`: training is complete, and the actor runs the last evaluation. Always `training` without an
        actor."""
        actors, ranks = ({job.name for job in self.jobs if job.kind == kind} for kind in ("actor", "finetune"))
        if not actors:
            return "training"
        if actors <= self._done:
            return "over"
        # Jobs other than ranks exit only after training.
        is_trained = bool(self._done - ranks) or (bool(ranks) and ranks <= self._done)
        return "evaluating" if is_trained else "training"

    def on_exit(self, job: Job, returncode: int) -> ExitVerdict:
        """Judge the exit of one job."""
        if job.kind in SERVER_KINDS:
            return ExitVerdict("failed", f"ended while the run needed it ({describe_exit(returncode)})")
        if returncode == EXIT_USER_ERROR:
            return ExitVerdict("user_error", "refused its input")
        if returncode != 0:
            verb = "ended with" if returncode > 0 else "was"
            return ExitVerdict("failed", f"{verb} {describe_exit(returncode)}")
        is_other_rank = job.kind == "finetune" and job.idx > 0
        if not is_other_rank and not self._training_is_complete():
            return ExitVerdict("failed", "ended (exit code 0) before training was complete")
        self._done.add(job.name)
        return ExitVerdict("continue" if self.unfinished else "finished")

    def _training_is_complete(self) -> bool:
        while self.trainer is not None and not self._is_trained:
            entries = self.trainer.read(timeout_s=0)
            if not entries:
                return False
            self._is_trained = any(
                isinstance(entry.record, TrainingDone) and entry.record.incarnation == self.incarnation
                for entry in entries
            )
        return True


@dataclass
class RestartBudget:
    """`supervise.max_server_restarts` an hour; restart k waits `server_restart_backoff_s` x 2 ** k, capped."""

    config: SuperviseConfig
    _times: list[float] = field(default_factory=list)

    def has_more(self, now: float) -> bool:
        """Whether there is one left at `now` (seconds)."""
        self._times = [each for each in self._times if now - each < _WINDOW_S]
        return len(self._times) < self.config.max_server_restarts

    def take(self, now: float) -> float | None:
        """Spend one restart; returns the seconds to wait before it, or None if there is none left."""
        if not self.has_more(now):
            return None
        self._times.append(now)
        return min(self.config.server_restart_backoff_s * 2.0 ** (len(self._times) - 1), MAX_BACKOFF_S)


@dataclass
class Server:
    """One server. `is_ours`: the launcher started its process. `joined`: it was added during the run. `due`: when it is
    restarted (ours) or retried (others). `trouble`: why it is being ended. Times are monotonic seconds."""

    name: str
    url: str
    is_ours: bool
    is_policy: bool
    budget: RestartBudget
    since: float
    group_port: int | None = None
    state: Literal["starting", "serving", "down", "removed"] = "starting"
    generation: int = 0
    has_served: bool = False
    due: float | None = None
    trouble: str = ""
    version: int | None = None
    joined: bool = False


class ServerKeeper:
    """State of all servers of one start of a run. Policy servers are announced in the stream `pool`; the run uses one
    only while it is up and has the weights.

    Args:
        session: of the run.
        now: monotonic seconds, as in all methods.
        changes: the stream `pool`.

    Attributes:
        phase: of the run. After training no server is restarted, because it would get no weights.
    """

    def __init__(self, session: RunSession, now: float, changes: StreamWriter[PoolChange]) -> None:
        self._session = session
        self._config = session.config.supervise
        self._changes = changes
        self._unserved_since: float | None = None
        self.phase: Phase = "training"
        self.servers: dict[str, Server] = {}
        for job in session.world.jobs:
            if job.kind in SERVER_KINDS:
                url, port, is_policy = job.url or "", job.weight_group_port, job.kind == POLICY_KIND
                budget = RestartBudget(self._config)
                self.servers[job.name] = Server(job.name, url, True, is_policy, budget, now, port)
        self._write_state()

    @property
    def policy_servers(self) -> list[Server]:
        """Policy servers that belong to the run."""
        return [server for server in self.servers.values() if server.is_policy and server.state != "removed"]

    @property
    def is_empty(self) -> bool:
        """Whether the run had policy servers and has none left."""
        return not self.policy_servers and any(server.is_policy for server in self.servers.values())

    def can_lose(self, name: str) -> bool:
        """Whether this server may exit without being restarted. `find_unserved` ends the run if it is missed."""
        return self.servers[name].is_policy and self.phase != "training"

    def survives_end_of(self, name: str, now: float) -> bool:
        """Whether the run continues if this job is ended, as a server that may be restarted or lost."""
        server = self.servers.get(name)
        if server is None:
            return False
        return (server.state != "removed" and server.budget.has_more(now)) or self.can_lose(name)

    def on_exit(self, name: str, returncode: int, now: float) -> str | None:
        """The process of a server exited. None: it will be restarted; else why not, completing `<job> ...`."""
        server = self.servers[name]
        reason = f"ended while the run needed it ({describe_exit(returncode)})"
        if server.trouble:
            reason = f"{server.trouble}; it was stopped"
        # A server that exits by itself, or cannot be used, before it ever served would only do so again.
        if server.is_policy and not server.has_served and (returncode >= 0 or server.trouble):
            return reason
        if not self._retry(server, reason, now):
            return f"{reason}{self._cap_text}"
        server.trouble = ""
        self._write_state()
        return None

    def give_up(self, name: str, trouble: str, now: float) -> None:
        """The server is about to be ended for `trouble`, which completes `<job> ...`."""
        server = self.servers[name]
        server.trouble = server.trouble or trouble
        self._down(server, server.trouble, now)
        self._write_state()

    def lose(self, name: str, trouble: str, now: float) -> None:
        """A server that we did not start cannot be used: it is retried, and leaves if that does not help."""
        server = self.servers[name]
        server.trouble = trouble
        if not self._retry(server, trouble, now):
            logger.error("%s %s%s: it leaves", name, trouble, self._cap_text)
            self.leave(name, trouble)
        self._write_state()

    def leave(self, name: str, trouble: str) -> None:
        """The server leaves the run for good."""
        server = self.servers[name]
        server.state, server.due, server.trouble = "removed", None, trouble
        self._announce(server, "removed", trouble)
        self._write_state()

    def add(self, url: str, now: float) -> Server:
        """Add a running server. Raises ValueError if the run has it."""
        if any(server.url == url and server.state != "removed" for server in self.servers.values()):
            raise ValueError(f"a server that the run does not have yet; it has {url}")
        number = sum(server.joined for server in self.servers.values())
        server = Server(f"joined_{number}", url, False, True, RestartBudget(self._config), now, joined=True)
        self.servers[server.name] = server
        self._up(server, now)
        return server

    def remove(self, server_or_url: str, now: float) -> Server:
        """Remove a server. Raises ValueError if none has that name or URL, or if it is the last one."""
        servers = self.policy_servers
        found = next((server for server in servers if server_or_url in (server.name, server.url)), None)
        if found is None:
            raise ValueError(f"a server of the run: {', '.join(f'{each.name} ({each.url})' for each in servers)}")
        if len(servers) == 1:
            raise ValueError("a server that is not the last one: a run needs one")
        if found.is_ours:
            # Its process is ended, so its rollouts cannot finish.
            self._down(found, "it was removed", now)
        self.leave(found.name, "it was removed")
        return found

    def take_due(self, now: float) -> list[Server]:
        """Servers to restart (ours) or retry (others) now."""
        due = [server for server in self.servers.values() if server.due is not None and server.due <= now]
        for server in due:
            server.due = None
        # After training a policy server would wait for weights forever.
        return [server for server in due if self.phase == "training" or not server.is_policy]

    def dues_s(self, now: float) -> list[float]:
        """Seconds until each planned action."""
        dues = [server.due for server in self.servers.values()]
        if self._unserved_since is not None:
            dues.append(self._unserved_since + self._unserved_grace_s())
        return [max(0.0, due - now) for due in dues if due is not None]

    def started(self, name: str, now: float) -> None:
        """The process of a server was restarted."""
        self.servers[name].generation += 1
        self._up(self.servers[name], now)

    def on_answer(self, answer: PoolAnswer, now: float) -> str | None:
        """Note a message of the trainer; returns why the server must be ended, if it must."""
        server = self.servers.get(answer.name)
        if server is None or server.generation != answer.generation or server.state in ("down", "removed"):
            return None
        if not isinstance(answer, ServerReady):
            return f"was dropped by the trainer: {answer.error}"
        if server.generation:
            logger.warning("%s is back with version %d", server.name, answer.version)
        server.state, server.has_served, server.since = "serving", True, now
        server.version, server.trouble = answer.version, ""
        self._write_state()
        return None

    def find_late(self, now: float) -> str | None:
        """A restarted server that got no weights within `vllm_config.start_timeout_s`."""
        for server in self.policy_servers:
            late = now - server.since > self._session.config.vllm_config.start_timeout_s
            if server.is_ours and server.generation and server.state == "starting" and late:
                return server.name
        return None

    def find_unserved(self, now: float) -> tuple[Server, str] | None:
        """The server that the last evaluation needs, and why the run fails without it; None while it can continue.

        After training a server that exits or restarts gets no weights any more. If no other one serves, the last
        evaluation would wait forever.
        """
        servers = self.policy_servers
        is_served = any(server.state == "serving" for server in servers)
        if self.phase != "evaluating" or not servers or is_served:
            self._unserved_since = None
            return None
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since < self._unserved_grace_s():
            return None
        server = max(servers, key=lambda server: server.since)
        trouble = server.trouble or ("is down" if server.state == "down" else "has not got the weights")
        return server, f"{server.name} {trouble}, while the last evaluation needed it. {_REPEAT}"

    def _unserved_grace_s(self) -> float:
        return ANSWER_S if any(server.state == "starting" for server in self.policy_servers) else END_S

    @property
    def _cap_text(self) -> str:
        cap = self._config.max_server_restarts
        return f", after {cap} restarts (supervise.max_server_restarts)" if cap else ""

    def _retry(self, server: Server, reason: str, now: float) -> bool:
        """Plan another start; False if the budget is used up."""
        delay_s = server.budget.take(now)
        if delay_s is None:
            return False
        logger.warning("%s %s; the next try is in %.1f s", server.name, reason, delay_s)
        self._down(server, reason, now)
        server.due = now + delay_s
        return True

    def _up(self, server: Server, now: float) -> None:
        server.state, server.since, server.due = "starting", now, None
        self._announce(server, "up", "")
        self._write_state()

    def _down(self, server: Server, reason: str, now: float) -> None:
        if server.state != "down":
            server.state, server.since = "down", now
            self._announce(server, "down", reason)

    def _announce(self, server: Server, event: Literal["up", "down", "removed"], reason: str) -> None:
        if not server.is_policy:
            return
        self._changes.write(
            PoolChange(
                name=server.name,
                url=server.url,
                event=event,
                generation=server.generation,
                time=record_time(),
                reason=reason,
                group_port=server.group_port,
                incarnation=self._session.identity.incarnation,
            )
        )
        self._changes.flush()

    def _write_state(self) -> None:
        """For the command `pool`."""
        states = [
            ServerState(each.name, each.url, each.state, each.generation + 1, each.joined, each.version, each.trouble)
            for each in self.servers.values()
            if each.is_policy
        ]
        write_state(self._session.run_dir, states)
