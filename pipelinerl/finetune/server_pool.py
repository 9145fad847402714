"""Which servers the trainer sends weights to, as the launcher's stream `pool` says: they leave at once, and join anew.

Used by `WeightsFeed` on rank 0. A thread follows the stream; a server that comes up is connected in the background, and
is `fresh` until it was given the weights and its log-probs were compared. What became of it is announced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipelinerl.errors import StreamError, WeightSyncError
from pipelinerl.records import PoolAnswer, PoolChange, ServerDropped, ServerReady
from pipelinerl.streams.base import Entry
from pipelinerl.weights.link import ServerAddress

logger = logging.getLogger(__name__)


class Membership(Protocol):
    """The part of `WeightPublisher` that is used here."""

    def join(
        self,
        address: ServerAddress,
        start_timeout_s: float,
        on_done: Callable[[ServerAddress, str | None], None],
        late: bool = True,
    ) -> None: ...

    def drop(self, name: str, reason: str) -> None: ...

    @property
    def servers(self) -> list[str]: ...


class ServerPool:
    """The servers of one start of a run.

    Args:
        publisher: connects with the servers.
        names: those of the plan.
        start_timeout_s: how long a server may take to come up.
        announce: writes to the trainer's stream `pool`.
        incarnation: of this start; changes of others are history.
        wake: lets a trainer that waits for data look at `has_fresh`.
    """

    def __init__(
        self,
        publisher: Membership,
        names: Sequence[str],
        start_timeout_s: float,
        announce: Callable[[PoolAnswer], object],
        incarnation: int,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._publisher = publisher
        self._start_timeout_s = start_timeout_s
        self._announce = announce
        self._incarnation = incarnation
        self._wake = wake
        self._clock = clock
        self._changed = threading.Condition()
        self._planned = frozenset(names)
        self._generations = dict.fromkeys(names, 0)
        self._ready: set[str] = set()
        self._removed: set[str] = set()
        self._last_error = ""
        self._failure: BaseException | None = None

    def connect_all(self, addresses: Sequence[ServerAddress]) -> None:
        """Connect the servers of the plan; returns when all are connected that have not been removed meanwhile.

        One that dies while it starts is started again by the launcher, and joins then.

        Raises:
            WeightSyncError: not all of them came in time.
            StreamError: the launcher cannot be heard.
        """
        for address in addresses:
            if self.is_first_start(address.name, self.generations().get(address.name)):
                self._join(address, 0, late=False)
        with self._changed:
            if not self._changed.wait_for(lambda: self._hears() and not self._missing(), self._start_timeout_s):
                error = f"; the last error: {self._last_error}" if self._last_error else ""
                raise WeightSyncError(
                    ", ".join(self._missing()), f"not connected within {self._start_timeout_s:g} s of the start{error}"
                )

    def fail(self, error: BaseException) -> None:
        """The stream can be followed no longer. The trainer hears of it when it asks for servers the next time."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._wake()

    def _hears(self) -> bool:
        """True; a trainer that goes on without the launcher would wait for servers that are there, or are gone."""
        if self._failure is not None:
            error = self._failure
            raise StreamError(f"what the launcher says of servers cannot be followed: {error}") from error
        return True

    def _missing(self) -> list[str]:
        return sorted(self._planned - self._removed - set(self._publisher.servers))

    def take(self, entry: Entry[PoolChange]) -> None:
        """Apply one change of the launcher. Called in the thread that follows the stream."""
        change = entry.record
        if change.incarnation != self._incarnation:
            return
        name = change.name
        with self._changed:
            self._ready.discard(name)
            if change.event == "up":
                self._generations[name] = change.generation
            else:
                self._generations.pop(name, None)
            if change.event == "removed":
                self._removed.add(name)
            self._changed.notify_all()
        if change.event == "up":
            logger.info("%s is started (%d): it joins when it is up", name, change.generation)
            self._join(ServerAddress(name, change.url, change.group_port), change.generation, late=True)
        else:
            logger.warning("%s is out (%s): %s", name, change.event, change.reason)
            self._publisher.drop(name, f"{change.event}: {change.reason}")

    def _join(self, address: ServerAddress, generation: int, late: bool) -> None:
        def on_joined(joined: ServerAddress, error: str | None) -> None:
            self._on_joined(joined, generation, error)

        self._publisher.join(address, self._start_timeout_s, on_joined, late)

    @property
    def fresh(self) -> list[str]:
        """Connected servers that have not been given weights since they came up. StreamError: as `generations`."""
        self._hears()
        connected = self._publisher.servers
        with self._changed:
            return [name for name in connected if name not in self._ready]

    def generations(self) -> dict[str, int]:
        """The start of each server that this is about, to be handed to `ready` and `drop` later on.

        Raises:
            StreamError: the launcher cannot be heard any more.
        """
        self._hears()
        with self._changed:
            return dict(self._generations)

    def is_first_start(self, name: str, generation: int | None) -> bool:
        """Whether that start of the server came with the run: then what is wrong with it is wrong with the run."""
        return generation == 0 and name in self._planned

    def ready(self, name: str, generation: int, version: int, probe_abs_diff: float) -> None:
        """That start of the server has `version` and agrees with the trainer: it may sample for training."""
        with self._changed:
            if self._generations.get(name) != generation:
                return
            self._ready.add(name)
        self._announce(
            ServerReady(
                name=name,
                generation=generation,
                version=version,
                time=self._clock(),
                probe_abs_diff=probe_abs_diff,
                incarnation=self._incarnation,
            )
        )

    def drop(self, name: str, generation: int | None, error: str) -> None:
        """That start of the server cannot be used: leave it, and say so to the launcher."""
        with self._changed:
            if generation is None or self._generations.get(name) != generation:
                return  # the launcher knew before
            del self._generations[name]
            self._ready.discard(name)
        self._publisher.drop(name, error)
        logger.error("%s is dropped: %s", name, error)
        self._announce(
            ServerDropped(
                name=name,
                generation=generation,
                error=error,
                time=self._clock(),
                incarnation=self._incarnation,
            )
        )

    def wait_for_fresh(self, timeout_s: float) -> None:
        """Block until a server waits for weights.

        Raises:
            WeightSyncError: none came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self.fresh), timeout_s):
                raise WeightSyncError("all servers", f"none of them came back within {timeout_s:g} s")

    def _on_joined(self, address: ServerAddress, generation: int, error: str | None) -> None:
        if error is not None:
            with self._changed:
                self._last_error = error
            self.drop(address.name, generation, error)
            return
        with self._changed:
            self._changed.notify_all()
        self._wake()
