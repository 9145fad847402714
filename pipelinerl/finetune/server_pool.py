"""Which servers the trainer sends weights to (rank 0).

A thread follows the launcher's stream `pool`, which says who leaves and who joins. A server that comes up is connected
in the background and is `fresh` until it was given the weights and its log-probs were compared; the outcome is
announced on the trainer's own stream `pool`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from pipelinerl.errors import StreamError, WeightSyncError
from pipelinerl.records import PoolAnswer, PoolChange, ServerDropped, ServerReady, record_time
from pipelinerl.role import RoleContext
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC, Entry
from pipelinerl.streams.read import Feed
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.manifest import folder_checksum, local_folder
from pipelinerl.weights.sync import WeightPublisher
from pipelinerl.world.jobs import CPU_TRANSPORT, GPU_TRANSPORT

logger = logging.getLogger(__name__)


def open_pool(context: RoleContext, stack: ExitStack, wake: Callable[[], None]) -> ServerPool:
    """The pool of trainer rank 0, connected with every server of the plan. Waits for the servers to come up.

    Args:
        stack: closes what was opened.
        wake: called when a server waits for weights.
    """
    config, world = context.config, context.world
    jobs = world.jobs_of("actor_llm")
    start_timeout_s = config.vllm_config.start_timeout_s
    publisher = WeightPublisher(
        token=context.token,
        transport=GPU_TRANSPORT if world.device == "cuda" else CPU_TRANSPORT,
        transports={job.name: world.transport_to(job) for job in jobs},
        timeout_s=config.supervise.weight_sync_timeout_s,
        kv_cache=config.vllm_config.kv_cache,
        master_address=world.master_addr,
        base_checksum=folder_checksum(local_folder(config.model_path)) if config.finetune.lora.sends_adapter else None,
    )
    stack.enter_context(publisher)
    answers = context.streams.writer(POOL_TOPIC, context.job.name, PoolAnswer)
    stack.callback(answers.close)

    def announce(answer: PoolAnswer) -> None:
        answers.write(answer)
        answers.flush()

    pool = ServerPool(publisher, [job.name for job in jobs], start_timeout_s, announce, context.incarnation, wake)
    feed = Feed(context.streams.reader(POOL_TOPIC, LAUNCHER, PoolChange), pool.apply, "pool", pool.fail).start()
    stack.callback(feed.stop)
    with context.heartbeat.waiting("servers to start", deadline_s=start_timeout_s):
        pool.connect_all([ServerAddress(job.name, str(job.url), job.weight_group_port) for job in jobs])
    return pool


class ServerPool:
    """The servers of one start of a run.

    Args:
        publisher: connects with the servers.
        names: of the servers in the plan.
        start_timeout_s: how long a server may take to come up.
        announce: writes to the trainer's stream `pool`.
        incarnation: of this start of the run; changes of other ones are ignored.
        wake: makes a trainer that waits for data look at `fresh`.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        names: Sequence[str],
        start_timeout_s: float,
        announce: Callable[[PoolAnswer], object],
        incarnation: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.publisher = publisher
        self._start_timeout_s = start_timeout_s
        self._announce = announce
        self._incarnation = incarnation
        self._wake = wake
        self._changed = threading.Condition()
        self._planned = frozenset(names)
        self._generations = dict.fromkeys(names, 0)
        self._ready: set[str] = set()
        self._removed: set[str] = set()
        self._last_error = ""
        self._failure: BaseException | None = None

    def connect_all(self, addresses: Sequence[ServerAddress]) -> None:
        """Connect the servers of the plan; returns when all that were not removed meanwhile are connected.

        A server that dies while it starts is restarted by the launcher, and joins then.

        Raises:
            WeightSyncError: not all of them came in time.
            StreamError: the launcher cannot be heard.
        """
        for address in addresses:
            if self.is_first_start(address.name, self.generations().get(address.name)):
                self._join(address, 0, late=False)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_informed() and not self._missing(), self._start_timeout_s):
                error = f"; the last error: {self._last_error}" if self._last_error else ""
                raise WeightSyncError(
                    ", ".join(self._missing()), f"not connected within {self._start_timeout_s:g} s of the start{error}"
                )

    def fail(self, error: BaseException) -> None:
        """The stream cannot be followed any more. The trainer learns of it when it asks for servers the next time."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._wake()

    def _is_informed(self) -> bool:
        """True, or StreamError: without the launcher's changes the trainer would wait for servers that are gone."""
        if self._failure is not None:
            error = self._failure
            raise StreamError(f"what the launcher says of servers cannot be followed: {error}") from error
        return True

    def _missing(self) -> list[str]:
        return sorted(self._planned - self._removed - set(self.publisher.servers))

    def apply(self, entry: Entry[PoolChange]) -> None:
        """Apply one change of the launcher, in the thread that follows the stream."""
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
            logger.info("%s was started (generation %d): it joins when it is up", name, change.generation)
            self._join(ServerAddress(name, change.url, change.group_port), change.generation, late=True)
        else:
            logger.warning("%s is out (%s): %s", name, change.event, change.reason)
            self.publisher.drop(name, f"{change.event}: {change.reason}")

    def _join(self, address: ServerAddress, generation: int, late: bool) -> None:
        self.publisher.join(
            address, self._start_timeout_s, lambda joined, error: self._on_joined(joined, generation, error), late
        )

    @property
    def fresh(self) -> list[str]:
        """Connected servers that have not been given weights since they came up. StreamError: as `generations`."""
        self._is_informed()
        connected = self.publisher.servers
        with self._changed:
            return [name for name in connected if name not in self._ready]

    def generations(self) -> dict[str, int]:
        """Number of the present start of each server, by name; `ready` and `drop` need it.

        Raises:
            StreamError: the launcher cannot be heard any more.
        """
        self._is_informed()
        with self._changed:
            return dict(self._generations)

    def is_first_start(self, name: str, generation: int | None) -> bool:
        """Whether the server started with the run: then a fault of it is a fault of the run."""
        return generation == 0 and name in self._planned

    def ready(self, name: str, generation: int, version: int, probe_abs_diff: float) -> None:
        """This start of the server has `version` and agrees with the trainer: it may sample for training."""
        with self._changed:
            if self._generations.get(name) != generation:
                return
            self._ready.add(name)
        self._announce(
            ServerReady(
                name=name,
                generation=generation,
                version=version,
                time=record_time(),
                probe_abs_diff=probe_abs_diff,
                incarnation=self._incarnation,
            )
        )

    def drop(self, name: str, generation: int | None, error: str) -> None:
        """This start of the server cannot be used: leave it and tell the launcher."""
        with self._changed:
            if generation is None or self._generations.get(name) != generation:
                return  # the launcher knows already
            del self._generations[name]
            self._ready.discard(name)
        self.publisher.drop(name, error)
        logger.error("%s is dropped: %s", name, error)
        self._announce(
            ServerDropped(
                name=name,
                generation=generation,
                error=error,
                time=record_time(),
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
