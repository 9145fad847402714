"""Runs one rollout to its end: a slot, a worker, a deadline, and further attempts after passing failures.

Called for every rollout of a group and of an evaluation; waits for a free slot, for the worker's answer and, unless
schedule=pipeline, for new weights that are on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, StartRollout
from pipelinerl.actor.gate import RolloutGate
from pipelinerl.actor.pool import SERVER_LOST
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.domains.datasets import Problem
from pipelinerl.llm.retry import Fault

#: How long a server may refuse all connections without costing rollouts a try. One whose engine died takes no more
#: connections some seconds before its process ends, which is what the launcher sees and tells the actor.
REFUSALS_FORGIVEN_S = 60.0


class RolloutRunner(Protocol):
    """Runs one rollout somewhere; the worker pool, or a fake in tests."""

    async def run(self, start: StartRollout, timeout_s: float) -> RolloutEnded | RolloutFailed: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout to run."""

    rollout_id: str
    group_id: str
    problem: Problem
    seed: int
    evaluation: bool = False


class Scheduler:
    """Runs rollouts on the least busy server.

    Args:
        slots: of the servers.
        runner: the worker pool.
        timeout_s: deadline of one try; a rollout that never returns has failed with `rollout_timeout`.
        max_retries: tries after the first one when the failure was a passing one, on another server if there is one.
        gate: what rollouts of training pass before each try; None: nothing holds them.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        slots: ServerSlots,
        runner: RolloutRunner,
        timeout_s: float,
        max_retries: int,
        gate: RolloutGate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._refuses_since: dict[int, float] = {}
        self._slots = slots
        self._runner = runner
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self.requests = 0
        self.retries = 0

    async def run(self, attempt: Attempt) -> RolloutEnded | RolloutFailed:
        """Return how `attempt` ended; failures are answers, only a broken run raises."""
        tries = 0
        server: int | None = None
        while True:
            gate = None if attempt.evaluation else self._gate
            server = await self._place(gate, avoid=server)
            try:
                with gate.passing() if gate is not None else nullcontext():
                    answer = await self._runner.run(_start(attempt, server), self._timeout_s)
            finally:
                self._slots.release(server)
            self.requests += answer.requests
            self.retries += answer.retries
            self._note_refusal(answer, server)
            if isinstance(answer, RolloutFailed) and self._lost_its_server(answer, server):
                self.retries += 1
                continue
            if isinstance(answer, RolloutEnded) or not answer.transient or tries >= self._max_retries:
                return answer
            tries += 1
            self.retries += 1

    def _lost_its_server(self, answer: RolloutFailed, server: int) -> bool:
        """Whether the failure says nothing about the rollout: it costs none of its tries."""
        if answer.reason == SERVER_LOST or (answer.transient and not self._slots.usable[server]):
            return True
        # The client has made its own pauses between its requests, so trying again at once does not spin.
        since = self._refuses_since.get(server)
        return since is not None and self._clock() - since < REFUSALS_FORGIVEN_S

    def _note_refusal(self, answer: RolloutEnded | RolloutFailed, server: int) -> None:
        """Keep since when a server has refused every connection."""
        if isinstance(answer, RolloutFailed) and answer.transient and answer.reason == Fault.REFUSED.value:
            self._refuses_since.setdefault(server, self._clock())
        elif not (isinstance(answer, RolloutFailed) and answer.reason == SERVER_LOST):
            self._refuses_since.pop(server, None)

    async def _place(self, gate: RolloutGate | None, avoid: int | None) -> int:
        """A slot, taken while `gate` is open: nobody holds a slot and waits at the gate."""
        while True:
            if gate is not None:
                await gate.wait_open()
            server = await self._slots.acquire(avoid=avoid)
            if gate is None or gate.is_open:
                return server
            self._slots.release(server)


def _start(attempt: Attempt, server: int) -> StartRollout:
    data: dict[str, Any] = attempt.problem.data
    return StartRollout(
        ticket=0,
        rollout_id=attempt.rollout_id,
        group_id=attempt.group_id,
        server=server,
        evaluation=attempt.evaluation,
        seed=attempt.seed,
        problem=data,
    )
