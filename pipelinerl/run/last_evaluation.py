"""Does the evaluation behind the end of training still have a server? Pure; asked by the supervisor at every tick.

The trainer alone gives servers their weights, and it is gone by then: a server that ends, or that was just being
started again when training ended, is of no use any more. Where no other one serves, the actor would wait for ever.
"""

from __future__ import annotations

from pipelinerl.run.policy import ExitPolicy
from pipelinerl.run.server_keeper import POLICY_KIND, Server, ServerKeeper
from pipelinerl.world import Job

#: How long the actor's own end may take to be heard, and what the trainer said last of a server that started lately.
END_S = 1.0
ANSWER_S = 20.0
_REPEAT = (
    "The trainer, which alone could give a new server the weights, is done and has saved the model. Start the same "
    "command again: it repeats the evaluation"
)


class LastEvaluation:
    """State: since when it has had no server.

    Args:
        policy: knows which jobs have ended.
        keeper: knows how the servers are.
    """

    def __init__(self, policy: ExitPolicy, keeper: ServerKeeper) -> None:
        self._policy = policy
        self._keeper = keeper
        self._unserved_since: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether only the evaluation behind the end of training is left to be done, on this node."""
        return self._policy.is_training_over and self._policy.awaits("actor")

    def can_lose(self, job: Job) -> bool:
        """Whether the end of that job is no reason to start it again, nor to end the run before `find_lost_server`."""
        return job.kind == POLICY_KIND and (self._policy.is_done("actor") or self.is_due)

    def find_lost_server(self, now: float) -> tuple[Server, str] | None:
        """The server that is missed, and why the run cannot end without it; None as long as it can."""
        servers = self._keeper.policy_servers
        if not self.is_due or not servers or any(server.state == "serving" for server in servers):
            self._unserved_since = None
            return None
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since < self._grace_s():
            return None
        server = max(servers, key=lambda server: server.since)
        trouble = server.trouble or ("is down" if server.state == "down" else "has not got the weights")
        return server, f"{server.name} {trouble}, while the last evaluation needed it. {_REPEAT}"

    def next_due_s(self, now: float) -> float | None:
        """Seconds until `find_lost_server` has to be asked again; None if nothing is missed."""
        if self._unserved_since is None:
            return None
        return max(0.0, self._unserved_since + self._grace_s() - now)

    def _grace_s(self) -> float:
        is_starting = any(server.state == "starting" for server in self._keeper.policy_servers)
        return ANSWER_S if is_starting else END_S
