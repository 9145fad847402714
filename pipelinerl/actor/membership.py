"""Which servers take rollouts: those that are up and have the weights. Told by launcher and trainer, stream `pool`.

Opened by the actor's loop; threads follow both instances of the stream, everything else runs on the event loop. A
server that goes away gives its running rollouts back at once; one that joins is described to the workers first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipelinerl.actor.frames import Servers
from pipelinerl.actor.pool import WorkerPool
from pipelinerl.actor.servers import fetch_max_model_lens
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.errors import WorkerError
from pipelinerl.records import PoolAnswer, PoolChange, ServerReady
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC, Entry
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.read import Feed

logger = logging.getLogger(__name__)
TRAINER_INSTANCE = "finetune_0"
#: How long a server that joined may fail to say what it is, and the pauses between the questions.
DESCRIBE_TIMEOUT_S = 300.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0


class ServerMembership:
    """The servers as the actor sees them, numbered as in `slots`.

    Args:
        urls: of the servers of the plan, by name. They count as up; nothing runs before the first weight update.
        slots: told which servers take rollouts.
        workers: told about servers that join.
        token: of the servers.
        incarnation: of this start; what older ones said is history.
    """

    def __init__(
        self, urls: Mapping[str, str], slots: ServerSlots, workers: WorkerPool, token: str, incarnation: int
    ) -> None:
        self._slots = slots
        self._workers = workers
        self._token = token
        self._incarnation = incarnation
        self._index = {name: index for index, name in enumerate(urls)}
        self._urls = list(urls.values())
        self._max_model_lens: list[int | None] = []
        self._started = asyncio.Event()
        self._up = set(urls)
        # The start of each server that is there, and the start that was given weights.
        self._generation = dict.fromkeys(urls, 0)
        self._ready = dict.fromkeys(urls, 0)
        self._described = set(urls)
        self._describing: dict[str, asyncio.Task[None]] = {}

    @property
    def usable(self) -> list[str]:
        """Names of the servers that take rollouts."""
        return [name for name, index in self._index.items() if self._slots.usable[index]]

    def begin(self, servers: Servers) -> None:
        """The servers of the plan were described to the workers."""
        self._max_model_lens = list(servers.max_model_lens)
        self._started.set()

    def apply_change(self, change: PoolChange) -> None:
        """Take what the launcher says."""
        if change.incarnation != self._incarnation:
            return
        name = change.name
        if change.event == "up":
            if name not in self._index:
                self._index[name] = self._slots.add()
                self._urls.append(change.url)
            self._generation[name] = change.generation
            self._up.add(name)
        else:
            self._up.discard(name)
        self._refresh(name)
        if change.event == "down" and name in self._index:
            lost = self._workers.give_up_server(self._index[name])
            logger.warning("%s went away (%s): %d rollouts are run again", name, change.reason, lost)

    def apply_answer(self, answer: PoolAnswer) -> None:
        """Take what the trainer says."""
        if answer.incarnation != self._incarnation or not isinstance(answer, ServerReady):
            return
        self._ready[answer.name] = answer.generation
        self._refresh(answer.name)

    def _refresh(self, name: str) -> None:
        index = self._index.get(name)
        if index is None:
            return  # the trainer was heard before the launcher
        has_weights = self._has_weights(name)
        if has_weights and name not in self._described:
            if name not in self._describing:
                self._describing[name] = asyncio.get_running_loop().create_task(self._describe(name, index))
            return
        if has_weights != self._slots.usable[index]:
            logger.info("%s %s rollouts", name, "takes" if has_weights else "takes no")
            self._slots.set_usable(index, has_weights)

    def _has_weights(self, name: str) -> bool:
        return name in self._up and self._ready.get(name) == self._generation[name]

    async def _describe(self, name: str, index: int) -> None:
        """Tell the workers about a server that joined, once it has said what it is."""
        await self._started.wait()
        try:
            found = await self._ask(name, self._urls[index])
        finally:
            # At once: what is heard of the server from now on asks again.
            del self._describing[name]
        if found is None:
            return
        self._max_model_lens += [None] * (index + 1 - len(self._max_model_lens))
        self._max_model_lens[index] = found.max_model_lens[0]
        count = len(self._max_model_lens)
        self._workers.set_servers(Servers(list(self._max_model_lens), self._urls[:count]))
        self._described.add(name)
        self._refresh(name)

    async def _ask(self, name: str, url: str) -> Servers | None:
        """The server's description; None if it went away meanwhile, or gave none for too long."""
        deadline, pause_s = time.monotonic() + DESCRIBE_TIMEOUT_S, FIRST_PAUSE_S
        while self._has_weights(name):
            try:
                return await fetch_max_model_lens([url], self._token)
            except WorkerError as error:
                if time.monotonic() + pause_s > deadline:
                    logger.error("%s takes no rollouts until its next start: %s", name, error)
                    return None
                logger.warning("%s takes no rollouts yet, it is asked again in %.0f s: %s", name, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return None


@contextlib.contextmanager
def follow_pool(
    hub: StreamHub, members: ServerMembership, on_failure: Callable[[BaseException], None]
) -> Iterator[None]:
    """Follow both instances of the stream in threads while the context is open.

    Args:
        hub: the run's streams.
        members: what the records are applied to, on the event loop that runs now.
        on_failure: called on the event loop with what ended a thread.
    """
    loop = asyncio.get_running_loop()

    def listener(apply: Callable[[Any], None]) -> Callable[[Entry[Any]], None]:
        def take(record: Any) -> None:
            try:
                apply(record)
            except Exception as error:  # noqa: BLE001 - a callback's error would only be logged; it ends the run
                on_failure(error)

        def listen(entry: Entry[Any]) -> None:
            loop.call_soon_threadsafe(take, entry.record)

        return listen

    def fail(error: BaseException) -> None:
        loop.call_soon_threadsafe(on_failure, error)

    changes = hub.reader(POOL_TOPIC, LAUNCHER, PoolChange)
    answers = hub.reader(POOL_TOPIC, TRAINER_INSTANCE, PoolAnswer)
    feeds = [
        Feed(changes, listener(members.apply_change), "pool", fail).start(),
        Feed(answers, listener(members.apply_answer), "pool-trainer", fail).start(),
    ]
    try:
        yield
    finally:
        for feed in feeds:
            feed.stop()
