"""What the actor knows of the trainer: policy version, settled samples, end of training.

Fed by the streams `trainer` and `fates` (`follow_trainer`), whose threads hand records over to the event loop; read by
the actor's loops, which wait on `subscribe`d events. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.gate import RolloutGate
from pipelinerl.records import (
    FateRecord,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingDone,
    WeightUpdateSuccess,
)
from pipelinerl.streams.base import FATES_TOPIC, TRAINER_TOPIC, Entry
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import Feed

TRAINER_INSTANCE = "finetune_0"
PREPROCESSOR_INSTANCE = "preprocessor_0"


class TrainerState:
    """Version and end of training of this incarnation; settles samples in `budget` on the way.

    Args:
        budget: told of every settled group and sample.
        incarnation: updates of other incarnations say nothing about the servers of this one.
        gate: told of every version that the servers have.
    """

    def __init__(self, budget: SampleBudget, incarnation: int, gate: RolloutGate | None = None) -> None:
        self._budget = budget
        self._gate = gate
        self._incarnation = incarnation
        self._subscribers: list[asyncio.Event] = []
        self.version: int | None = None
        self.steps_done = 0
        self.done = False

    @property
    def current_version(self) -> int:
        """The version that the servers sample with, 0 before the first update."""
        return self.version or 0

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set at every change. Clear it before looking at the state, then wait for it."""
        event = asyncio.Event()
        self._subscribers.append(event)
        try:
            yield event
        finally:
            self._subscribers.remove(event)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait until `predicate` holds; it is tried now and after every change."""
        with self.subscribe() as changed:
            while not predicate():
                await changed.wait()
                changed.clear()

    def apply_message(self, message: TrainerMessage) -> None:
        """Take one message of the trainer."""
        match message:
            case WeightUpdateSuccess() if message.incarnation == self._incarnation:
                self.version = message.version
                if self._gate is not None:
                    self._gate.served(message.version)
            case TrainerStarted() if message.incarnation == self._incarnation:
                self._stand_at(message.step)
            case StepDone():
                self._budget.note_trained(message.step, message.num_samples)
                if message.incarnation == self._incarnation:
                    self._stand_at(message.step)
                for group_id in message.group_ids:
                    self._budget.settle_group(group_id)
            case TrainingDone() if message.incarnation == self._incarnation:
                self.version = message.version
                self.done = True
        self.notify()

    def apply_fate(self, fate: FateRecord) -> None:
        """Take one fate that the preprocessor decided."""
        self._budget.settle_samples(fate.group_id, fate.sample_ids)
        self.notify()

    def _stand_at(self, step: int) -> None:
        self.steps_done = step
        self._budget.stand_at(step)

    def serve(self, version: int) -> None:
        """Without a trainer: the servers sample with `version` from now on."""
        self.version = version
        self.notify()

    def finish(self) -> None:
        """Without a trainer: there is nothing left to do."""
        self.done = True
        self.notify()

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        for event in self._subscribers:
            event.set()


@contextlib.contextmanager
def follow_trainer(
    hub: StreamHub, state: TrainerState, on_message: Callable[[], None], on_failure: Callable[[BaseException], None]
) -> Iterator[None]:
    """Follow both streams in threads of their own while the context is open.

    Args:
        hub: the run's streams.
        state: what the records are applied to, on the event loop that runs now.
        on_message: called on the event loop after every record.
        on_failure: called on the event loop with what ended a thread.
    """
    loop = asyncio.get_running_loop()

    def listener(apply: Callable[[Any], None]) -> Callable[[Entry[Any]], None]:
        def take(record: Any) -> None:
            apply(record)
            on_message()

        def listen(entry: Entry[Any]) -> None:
            loop.call_soon_threadsafe(take, entry.record)

        return listen

    def fail(error: BaseException) -> None:
        loop.call_soon_threadsafe(on_failure, error)

    messages = hub.reader(TRAINER_TOPIC, TRAINER_INSTANCE, TrainerMessage)
    fates = hub.reader(FATES_TOPIC, PREPROCESSOR_INSTANCE, FateRecord)
    feeds = [
        Feed(messages, listener(state.apply_message), "trainer", fail).start(),
        Feed(fates, listener(state.apply_fate), "fates", fail).start(),
    ]
    try:
        yield
    finally:
        for feed in feeds:
            feed.stop()
