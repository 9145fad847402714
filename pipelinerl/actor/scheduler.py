"""Runs one rollout to its end: a slot, a worker, a deadline, and further attempts after passing failures.

Called for every rollout of a group and of an evaluation; waits for a free slot, for the worker's answer and, unless
schedule=pipeline, for new weights that are on their way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, StartRollout
from pipelinerl.actor.gate import RolloutGate
from pipelinerl.actor.pool import SERVER_LOST
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.llm.client import Fault, retry_delay_s

#: How long a server may refuse all connections without costing rollouts a try, and how long one rollout may be refused.
#: A server whose engine died takes no more connections some seconds before its process ends, which is what the launcher
#: sees and tells the actor.
REFUSALS_FORGIVEN_S = 60.0


class RolloutRunner(Protocol):
    """Runs one rollout somewhere; the worker pool, or a fake in tests."""

    async def run(self, start: StartRollout, timeout_s: float) -> RolloutEnded | RolloutFailed: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout to run. `record`: its tokens are wanted though it is an evaluation."""

    rollout_id: str
    group_id: str
    problem: Problem
    seed: int
    evaluation: bool = False
    record: bool = False


class Scheduler:
    """Runs rollouts on the least busy server.

    Args:
        slots: of the servers.
        runner: the worker pool.
        timeout_s: deadline of one try; a rollout that never returns has failed with `rollout_timeout`.
        max_retries: tries after the first one when the failure was a passing one, on another server if there is one.
        gate: what rollouts of training pass before each try; None: nothing holds them.
        clock: seconds that only grow.
        sleep: pauses for so many seconds.
    """

    def __init__(
        self,
        slots: ServerSlots,
        runner: RolloutRunner,
        timeout_s: float,
        max_retries: int,
        gate: RolloutGate | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._sleep = sleep
        self._refuses_since: dict[int, float] = {}
        self._slots = slots
        self._runner = runner
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self.requests = 0
        self.retries = 0

    async def run(self, attempt: Attempt) -> RolloutEnded | RolloutFailed:
        """Return how `attempt` ended; failures are answers, only a broken run raises."""
        tries = unpaused = 0
        refused_since: float | None = None
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
            refused_since = self._note_refusal(answer, server, refused_since)
            if isinstance(answer, RolloutFailed) and self._lost_its_server(answer, server):
                refused_since = None
                self.retries += 1
                continue
            if refused_since is not None and self._is_forgiven(server, refused_since):
                self.retries += 1
                if not answer.retries:
                    # The client pauses between its requests; without any, trying again at once would spin.
                    await self._sleep(retry_delay_s(unpaused, 0.0))
                    unpaused += 1
                continue
            if isinstance(answer, RolloutEnded) or not answer.transient or tries >= self._max_retries:
                return answer
            tries += 1
            self.retries += 1

    def _lost_its_server(self, answer: RolloutFailed, server: int) -> bool:
        """Whether the failure says nothing about the rollout: it costs none of its tries."""
        return answer.reason == SERVER_LOST or (answer.transient and not self._slots.usable[server])

    def _is_forgiven(self, server: int, refused_since: float) -> bool:
        """Whether neither the server has refused for too long, nor the rollout has been refused, by whomever: others
        may well be answered while something of its own is refused."""
        return self._clock() - min(refused_since, self._refuses_since[server]) < REFUSALS_FORGIVEN_S

    def _note_refusal(
        self, answer: RolloutEnded | RolloutFailed, server: int, refused_since: float | None
    ) -> float | None:
        """Keep since when a server has refused every connection, until it answers or is known to be gone. Returns since
        when the rollout has been refused; None: it was not this time."""
        if isinstance(answer, RolloutFailed) and answer.reason == Fault.CANNOT_CONNECT.value:
            return None  # the server was not even asked
        if isinstance(answer, RolloutFailed) and answer.transient and answer.reason == Fault.REFUSED.value:
            now = self._clock()
            self._refuses_since.setdefault(server, now)
            return now if refused_since is None else refused_since
        self._refuses_since.pop(server, None)
        return None

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
        record=attempt.record,
    )
