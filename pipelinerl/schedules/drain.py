"""The trainer's end of draining: ask the actor to let running rollouts end, and wait for its answer.

Called by the trainer's loop on every rank. Rank 0 waits for the actor's record on the stream `turns`, at most
`timeout_s`; the other ranks wait for rank 0. The actor needs nothing of the trainer to end rollouts, so the two never
wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.errors import WorkerError
from pipelinerl.records.turns import Drained, DrainRequest
from pipelinerl.streams.base import StreamReader, StreamWriter


class Waiter(Protocol):
    """The part of the heartbeat that is needed."""

    def waiting(self, what: str, deadline_s: float | None = None) -> AbstractContextManager[object]: ...


@dataclass
class Drain:
    """Rank 0's end.

    Attributes:
        requests: stream `turns` of the trainer.
        answers: stream `turns` of the actor.
        timeout_s: longest wait; rollouts have a time-out of their own, which is shorter.
        should_stop: asked before the wait and whenever it was woken; True ends it.
    """

    requests: StreamWriter[DrainRequest]
    answers: StreamReader[Drained]
    incarnation: int
    heartbeat: Waiter
    timeout_s: float
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic

    def wait(self, version: int) -> bool:
        """Return True once no rollout runs and none starts before `version` is served; False if asked to stop.

        Raises:
            WorkerError: rollouts still run after `timeout_s`.
        """
        self.requests.write(DrainRequest(version=version, time=time.time(), incarnation=self.incarnation))
        self.requests.flush()
        deadline = self.clock() + self.timeout_s
        with self.heartbeat.waiting("running rollouts to end", deadline_s=self.timeout_s):
            while not self.should_stop():
                left_s = deadline - self.clock()
                if left_s <= 0:
                    raise WorkerError(
                        f"rollouts still ran {self.timeout_s:g} s after the trainer asked for the update to version "
                        f"{version} (actor.rollout_timeout_s): the actor made no progress"
                    )
                for entry in self.answers.read(left_s):
                    answer = entry.record
                    if answer.incarnation == self.incarnation and answer.version >= version:
                        return True
        return False

    def wake(self) -> None:
        """Let a `wait` look at `should_stop` again. Thread-safe."""
        self.answers.wake()
