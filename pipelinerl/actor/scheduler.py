"""Runs each rollout to its end: on the least busy server, with retries, and not while weight updates pause rollouts.

| who waits                | until                                                        |
|--------------------------|--------------------------------------------------------------|
| `run`                    | a slot is free; then the worker answers, at most `timeout_s` |
| a training rollout       | also until a pause is over (every schedule but `pipeline`)   |
| `hold_updates`           | a pause is over                                              |
| who reads `quiet`        | a pause is requested and no rollout runs                     |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from msgspec.structs import replace

from pipelinerl.actor.progress import Changes
from pipelinerl.actor.workers import SERVER_LOST, Answer, RolloutEnded, StartRollout, WorkerPool
from pipelinerl.llm.client import Fault, retry_delay_s

#: A rollout may be refused for this long without costing it a try: a server whose engine died refuses connections some
#: seconds before its process ends and the launcher reports it.
REFUSALS_FORGIVEN_S = 60.0


@dataclass(eq=False)
class ServerLoad:
    """One server: its rollouts now, and the times for its metrics (seconds, monotonic)."""

    index: int
    usable: bool = True
    running: int = 0
    reported_at: float = field(default_factory=lambda: monotonic())
    counted_at: float = field(default_factory=lambda: monotonic())
    idle_s: float = 0.0
    rollout_s: float = 0.0

    def change_running(self, by: int) -> None:
        """Add to `running`; the time until now counts with the old value."""
        now = monotonic()
        seconds, self.counted_at = now - self.counted_at, now
        self.rollout_s += self.running * seconds
        if not self.running:
            self.idle_s += seconds
        self.running += by

    def report(self) -> dict[str, float]:
        """Return how busy the server was since the last report."""
        self.change_running(0)
        seconds = self.counted_at - self.reported_at
        values = {
            f"actor/server_busy_{self.index}": float(self.running),  #: rollouts running on the server now
            f"actor/server_idle_s_{self.index}": self.idle_s,  #: seconds without any rollout since the last record
            #: running rollouts on average since the last record
            f"actor/server_load_{self.index}": self.rollout_s / seconds if seconds > 0 else 0.0,
        }
        self.reported_at, self.idle_s, self.rollout_s = self.counted_at, 0.0, 0.0
        return values


@dataclass(eq=False)
class _Waiter:
    slot: asyncio.Future[ServerLoad]
    evaluation: bool
    avoid: ServerLoad | None


class Scheduler:
    """Places rollouts on servers, each with `slots_per_server` slots. Lives on one event loop.

    Servers are numbered from 0 in the order in which they joined; a number is never reused.

    Args:
        num_servers: servers of the plan, all usable at first.
        pool: runs the rollouts.
        timeout_s: deadline of one try; a rollout that never returns fails with `rollout_timeout`.
        max_retries: tries after the first one for transient failures, on another server if possible.
        changes: notified when a slot is free that nobody waits for, and at the end of a pause.
    """

    def __init__(
        self,
        num_servers: int,
        slots_per_server: int,
        pool: WorkerPool,
        timeout_s: float,
        max_retries: int,
        changes: Changes,
    ) -> None:
        self.servers = [ServerLoad(index) for index in range(num_servers)]
        #: Versions whose update may come now, because a pause was requested and no rollout runs.
        self.quiet: asyncio.Queue[int] = asyncio.Queue()
        self.retries = 0
        self._slots_per_server = slots_per_server
        self._pool = pool
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._changes = changes
        self._waiting: list[_Waiter] = []
        self._paused_for: int | None = None
        self._is_quiet = False
        # Training rollouts that run, and holders of updates.
        self._holds = 0

    @property
    def total_slots(self) -> int:
        """Slots of all servers, including those that are away for now."""
        return len(self.servers) * self._slots_per_server

    @property
    def has_free_slot(self) -> bool:
        """Whether a training rollout that came now would start at once."""
        return not self._waiting and self._paused_for is None and self._least_busy(None) is not None

    async def run(self, rollout: StartRollout) -> Answer:
        """Return how `rollout` ended. Failures are returned; only a broken run raises."""
        tries = refusals = 0
        refused_since: float | None = None
        server: ServerLoad | None = None
        while True:
            server = await self._acquire(rollout.evaluation, avoid=server)
            try:
                answer = await self._pool.run(replace(rollout, server=server.index), self._timeout_s)
            finally:
                self._release(server, rollout.evaluation)
            self.retries += answer.retries
            if isinstance(answer, RolloutEnded):
                return answer
            is_refused = answer.transient and answer.reason == Fault.REFUSED.value
            if is_refused and refused_since is None:
                refused_since = monotonic()
            elif not is_refused and answer.reason != Fault.CANNOT_CONNECT.value:
                refused_since = None  # the server was asked, and answered
            if answer.reason == SERVER_LOST or (answer.transient and not server.usable):
                refused_since = None  # the failure says nothing about the rollout
            elif is_refused and refused_since is not None and monotonic() - refused_since < REFUSALS_FORGIVEN_S:
                if not answer.retries:
                    # The client pauses between its own retries; without any, an immediate try would spin.
                    await asyncio.sleep(retry_delay_s(refusals, 0.0))
                    refusals += 1
            elif not answer.transient or tries >= self._max_retries:
                return answer
            else:
                tries += 1
            self.retries += 1

    def add_server(self) -> int:
        """Add a server that is not usable yet, and return its number."""
        self.servers.append(ServerLoad(len(self.servers), usable=False))
        return len(self.servers) - 1

    def set_usable(self, index: int, usable: bool) -> None:
        """Say whether a server accepts rollouts. Those that run on it keep their slots."""
        self.servers[index].usable = usable
        self._assign_slots()

    def pause(self, version: int) -> None:
        """Start no training rollout until `weights_served(version)`; `quiet` gets `version` when none runs any more."""
        self._paused_for = version
        self._is_quiet = False
        self._check_quiet()

    def weights_served(self, version: int) -> None:
        """Note that the servers sample with `version`; this ends a pause for that version or an earlier one."""
        if self._paused_for is not None and version >= self._paused_for:
            self._paused_for = None
            self._assign_slots()
            self._changes.notify()

    @asynccontextmanager
    async def hold_updates(self) -> AsyncIterator[None]:
        """Let pauses wait for the end of the context as for a rollout. A pause that has begun is waited for first."""
        await self._changes.wait_for(lambda: self._paused_for is None)
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._check_quiet()

    def report(self) -> dict[str, float]:
        """Return the metrics of all servers since the last report."""
        values = {"actor/retries": float(self.retries)}  #: rollouts restarted so far
        for server in self.servers:
            values |= server.report()
        return values

    async def _acquire(self, evaluation: bool, avoid: ServerLoad | None) -> ServerLoad:
        """Wait for a slot, first come, first served; `avoid` is used only if no other server is free."""
        waiter = _Waiter(asyncio.get_running_loop().create_future(), evaluation, avoid)
        self._waiting.append(waiter)
        self._assign_slots()
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                # The slot was assigned in the same moment.
                self._release(waiter.slot.result(), evaluation)
            raise

    def _release(self, server: ServerLoad, evaluation: bool) -> None:
        server.change_running(-1)
        if not evaluation:
            self._holds -= 1
            self._check_quiet()
        self._assign_slots()

    def _assign_slots(self) -> None:
        for waiter in list(self._waiting):
            if waiter.slot.cancelled() or (self._paused_for is not None and not waiter.evaluation):
                continue
            server = self._least_busy(waiter.avoid)
            if server is None:
                break
            self._waiting.remove(waiter)
            server.change_running(1)
            self._holds += not waiter.evaluation
            waiter.slot.set_result(server)
        if self.has_free_slot:
            self._changes.notify()

    def _least_busy(self, avoid: ServerLoad | None) -> ServerLoad | None:
        free = [server for server in self.servers if server.usable and server.running < self._slots_per_server]
        others = [server for server in free if server is not avoid]
        return min(others or free, key=lambda server: server.running, default=None)

    def _check_quiet(self) -> None:
        if self._paused_for is not None and not self._holds and not self._is_quiet:
            self._is_quiet = True
            self.quiet.put_nowait(self._paused_for)
