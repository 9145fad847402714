"""Which server takes the next rollout: the least busy one, at most `llm_max_rollouts` on each.

Called by the scheduler; `acquire` waits for a free slot of a server that is there, first come first served. Servers are
numbered from 0 in the order in which they came; a number is never given to another server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from pipelinerl.actor.occupancy import Occupancy


class ServerSlots:
    """Slots of `num_servers` servers with `slots_per_server` each.

    Args:
        on_idle: called when a slot is free and nobody waits for it.
        clock: seconds, monotonic; for `occupancy`.
    """

    def __init__(
        self,
        num_servers: int,
        slots_per_server: int,
        on_idle: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.busy = [0] * num_servers
        self.occupancy = Occupancy(self.busy, clock)
        self.usable = [True] * num_servers
        self._slots_per_server = slots_per_server
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._on_idle = on_idle

    @property
    def total(self) -> int:
        """Slots of all servers, those that are away for now included: they come back."""
        return len(self.busy) * self._slots_per_server

    @property
    def has_idle(self) -> bool:
        """Whether a slot is free that nobody waits for."""
        return not self._waiting and self._has_free()

    def _has_free(self) -> bool:
        # A plain loop: this is asked several times for every rollout.
        for count, usable in zip(self.busy, self.usable, strict=True):
            if usable and count < self._slots_per_server:
                return True
        return False

    def add(self) -> int:
        """One more server, not usable yet; returns its number."""
        self.busy.append(0)
        self.occupancy.add()
        self.usable.append(False)
        return len(self.busy) - 1

    def set_usable(self, server: int, usable: bool) -> None:
        """Say whether a server takes rollouts. Slots that are taken stay so until they are released."""
        self.usable[server] = usable
        self._hand_over()

    async def acquire(self, avoid: int | None = None) -> int:
        """Wait for a slot and return its server; `avoid` names a server to keep away from if another one is free."""
        if self.has_idle:
            return self._take(avoid)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            # The slot may have been handed over in the same moment.
            if turn.done() and not turn.cancelled():
                self.release(turn.result())
            elif turn in self._waiting:
                # A release in between has already passed over the cancelled turn.
                self._waiting.remove(turn)
            raise

    def release(self, server: int) -> None:
        """Give a slot back: to the one who waits longest, or to nobody."""
        self.occupancy.before_change(server)
        self.busy[server] -= 1
        self._hand_over()

    def _hand_over(self) -> None:
        """Give free slots to those who wait; say so if one is left."""
        while self._waiting and self._has_free():
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._take(None))
        if self.has_idle:
            self._on_idle()

    def _take(self, avoid: int | None) -> int:
        full = self._slots_per_server
        busy = self.busy
        if not all(self.usable):
            busy = [count if usable else full for count, usable in zip(self.busy, self.usable, strict=True)]
        if avoid is not None:
            others = [count if server != avoid else full for server, count in enumerate(busy)]
            if min(others) < full:
                busy = others
        server = busy.index(min(busy))
        self.occupancy.before_change(server)
        self.busy[server] += 1
        return server
