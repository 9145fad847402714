"""When the servers get the trainer's weights, and which servers there are. Every rank takes part.

Rank 0 publishes; the other ranks take part in gathering a sharded model and in the probe's forward pass. A server that
could not be updated is dropped and reported to the launcher, and samples no more.

On rank 0 a thread follows the launcher's stream `pool`, which says who leaves and who joins. A server that comes up is
connected in the background and is `fresh` until it was given the weights and its log-probs were compared; the outcome
is announced on the trainer's own stream `pool`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pipelinerl.config.run import RunConfig
from pipelinerl.config.schedule import update_interval
from pipelinerl.errors import ConfigError, StreamError, WeightSyncError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.probe import Probe, log_results
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import PoolAnswer, PoolChange, ServerDropped, ServerReady, record_time
from pipelinerl.role import RoleContext
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC, Entry
from pipelinerl.streams.read import Feed
from pipelinerl.weights.buffers import WeightSource, update_problems
from pipelinerl.weights.link import ServerAddress
from pipelinerl.weights.manifest import ServerModel, folder_checksum, local_folder, read_manifest
from pipelinerl.weights.sync import ProbeResult, ProbeSequence, UpdateReport, WeightPublisher
from pipelinerl.world.jobs import CPU_TRANSPORT, GPU_TRANSPORT

logger = logging.getLogger(__name__)


def update_is_due(config: RunConfig, step: int, is_last: bool = False) -> bool:
    """Whether the servers get the weights of `step`. From the configuration and the step alone: all ranks agree, and a
    resumed run keeps the rhythm."""
    return config.sends_weights and (is_last or step % update_interval(config) == 0)


def check_checkpoint(backend: Backend, model_path: str) -> None:
    """Refuse a model of whose checkpoint the trainer has other tensors: servers of it could not be updated.

    Raises:
        ConfigError: names the tensors.
    """
    folder = local_folder(model_path)
    tensors = None if folder is None else read_manifest(folder)
    policy = backend.policy
    tied = bool(getattr(policy.language_model.config.get_text_config(), "tie_word_embeddings", False))
    rank = policy.adapter_config.r if policy.sends_adapter else None
    sent = {meta.name: meta.shape for meta in backend.update_source().metadata()}
    if problems := update_problems(ServerModel(tensors, tied, adapter_rank=rank), sent):
        raise ConfigError(
            "model_path",
            model_path,
            f"a checkpoint with the tensors that {type(policy.language_model).__name__} has ({'; '.join(problems)})",
            "Use an unquantized checkpoint of a causal language model.",
        )


@dataclass(frozen=True)
class Delivery:
    """One update as the loop sees it. On ranks other than the first, numbers of servers and bytes are 0."""

    version: int
    seconds: dict[str, float]
    num_servers: int
    probe_abs_diff: float | None
    total_s: float
    sent_bytes: int = 0


class WeightSync:
    """Sends versions of the weights.

    Args:
        backend: weights travel in the dtype of its policy's servers; with `sends_adapter` the adapter alone.
        ranks: of the trainer.
        pool: the servers (rank 0 only).
        join_tokens: tokens that a server is probed with when it joins during a run.
        return_timeout_s: how long to wait for a server that receives the final weights.
        packed: probe sequences share a row, as samples do in training; False: each has a forward pass of its own.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: Ranks,
        pool: ServerPool | None,
        join_tokens: Sequence[Sequence[int]] = (),
        return_timeout_s: float = 0.0,
        packed: bool = True,
    ) -> None:
        self.probe = Probe(backend, ranks, packed)
        self._backend = backend
        self._ranks = ranks
        self._pool = pool
        self._join_tokens = join_tokens
        self.return_timeout_s = return_timeout_s

    @property
    def has_fresh(self) -> bool:
        """Whether a server waits for its first weights (known on rank 0)."""
        return self._pool is not None and bool(self._pool.fresh)

    def send(self, version: int, probe_tokens: Sequence[Sequence[int]] = (), required: bool = False) -> Delivery:
        """Give all servers the present weights as `version`; compare log-probs of `probe_tokens` if there are any.

        Args:
            version: number of optimizer steps that the weights have had.
            probe_tokens: tokens to compare with all servers.
            required: some server must have them in the end: wait until one is there.

        Raises:
            WeightSyncError: a server of the run's start disagrees beyond the dtype's tolerance; or no server came back
                to receive the final weights.
        """
        start = time.perf_counter()
        report = self._publish(version)
        while self._ranks.broadcast(int(required and not report.updated)):
            if self._pool is not None:
                self._pool.wait_for_fresh(self.return_timeout_s)
            report = self._publish(version)
        difference = self._verify(version, report, probe_tokens)
        return Delivery(
            version=version,
            seconds=report.seconds,
            num_servers=report.num_servers,
            probe_abs_diff=difference,
            total_s=time.perf_counter() - start,
            sent_bytes=report.sent_bytes,
        )

    def send_to_fresh(self, version: int) -> None:
        """Give the servers that wait for their first weights the present ones; the others are left alone."""
        report = self._publish(version, self._pool.fresh if self._pool else ())
        self._verify(version, report, ())

    def _publish(self, version: int, names: Collection[str] | None = None) -> UpdateReport:
        """What happened, on rank 0; other ranks take part in gathering the weights and get an empty report."""
        source = self._backend.update_source()
        if self._pool is None:
            source.follow()
            return UpdateReport(version)
        try:
            return self._pool.publish(version, source, names)
        finally:
            source.done()

    def _verify(self, version: int, report: UpdateReport, probe_tokens: Sequence[Sequence[int]]) -> float | None:
        """Probe all updated servers with `probe_tokens`, if any; else those that are fresh. All ranks call it.

        Returns:
            The mean difference in nats on rank 0; None if no server was probed.
        """
        updated = [update.name for update in report.updated]
        fresh = {name for name in self._pool.fresh if name in updated} if self._pool else set[str]()
        if not self._ranks.broadcast(int(bool(probe_tokens) or bool(fresh))):
            return None
        sequences = self.probe.sequences(probe_tokens or self._join_tokens)
        results = {}
        for name in updated if probe_tokens else sorted(fresh):
            result = self._probe_one(version, name, report.generations.get(name, 0), sequences, name in fresh)
            if result is not None:
                results[name] = result
        return log_results(version, results) if results else None

    def _probe_one(
        self, version: int, name: str, generation: int, sequences: Sequence[ProbeSequence], is_fresh: bool
    ) -> ProbeResult | None:
        """Compare with one server; None if it was dropped."""
        pool = self._pool
        assert pool is not None
        try:
            result = pool.publisher.probe(sequences, name)
        except WeightSyncError as error:
            pool.drop(name, generation, str(error))
            return None
        try:
            self.probe.check(version, name, result)
        except WeightSyncError as error:
            if not pool.is_present(name, generation):
                return None  # it was restarted since the update; the next one is about it
            if not is_fresh or pool.is_first_start(name, generation):
                raise
            pool.drop(name, generation, str(error))
            return None
        if is_fresh:
            pool.ready(name, generation, version, result.mean_abs_diff)
        return result


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
        self._planned = set(names)
        self._generations = dict.fromkeys(names, 0)
        self._ready: set[str] = set()
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
            if self.is_present(address.name, 0):
                self._join(address)

        def are_there() -> bool:
            self._check_stream()
            return not self._missing()

        with self._changed:
            if not self._changed.wait_for(are_there, self._start_timeout_s):
                error = f"; the last error: {self._last_error}" if self._last_error else ""
                raise WeightSyncError(
                    ", ".join(self._missing()), f"not connected within {self._start_timeout_s:g} s of the start{error}"
                )

    def _missing(self) -> list[str]:
        return sorted(self._planned - set(self.publisher.servers))

    def fail(self, error: BaseException) -> None:
        """The stream cannot be followed any more. The trainer learns of it when it asks for servers the next time."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._wake()

    def _check_stream(self) -> None:
        """StreamError: without the launcher's changes the trainer would wait for servers that are gone."""
        if self._failure is not None:
            error = self._failure
            raise StreamError(f"cannot follow the launcher's messages about servers: {error}") from error

    def publish(self, version: int, source: WeightSource, names: Collection[str] | None = None) -> UpdateReport:
        """Give the connected servers (or `names`) `version`, and drop those that could not be given it.

        Raises:
            StreamError: the launcher cannot be heard any more.
            WeightSyncError: as `WeightPublisher.publish`.
        """
        self._check_stream()
        report = self.publisher.publish(version, source, names)
        for name, error in report.failed.items():
            self.drop(name, report.generations.get(name, 0), f"could not be given version {version}: {error}")
        return report

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
                self._planned.discard(name)
            self._changed.notify_all()
        if change.event == "up":
            logger.info("%s was started (generation %d): it joins when it is up", name, change.generation)
            self._join(ServerAddress(name, change.url, change.group_port, change.generation))
        else:
            logger.warning("%s is out (%s): %s", name, change.event, change.reason)
            self.publisher.drop(name, f"{change.event}: {change.reason}")

    def _join(self, address: ServerAddress) -> None:
        is_late = not self.is_first_start(address.name, address.generation)
        self.publisher.join(address, self._start_timeout_s, self._on_joined, is_late)

    def _on_joined(self, address: ServerAddress, error: str | None) -> None:
        if error is not None:
            with self._changed:
                self._last_error = error
            self.drop(address.name, address.generation, error)
            return
        with self._changed:
            self._changed.notify_all()
        self._wake()

    @property
    def fresh(self) -> list[str]:
        """Connected servers that were not given weights since they came up. StreamError: as `publish`."""
        self._check_stream()
        connected = self.publisher.servers
        with self._changed:
            return [name for name in connected if name not in self._ready]

    def is_present(self, name: str, generation: int) -> bool:
        """Whether this start of the server is the newest, and it has not ended."""
        with self._changed:
            return self._generations.get(name) == generation

    def is_first_start(self, name: str, generation: int) -> bool:
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

    def drop(self, name: str, generation: int, error: str) -> None:
        """This start of the server cannot be used: leave it and tell the launcher."""
        with self._changed:
            if self._generations.get(name) != generation:
                return  # the launcher knows already
            del self._generations[name]
            self._ready.discard(name)
        self.publisher.drop(name, error)
        logger.error("%s is dropped: %s", name, error)
        now, start = record_time(), self._incarnation
        self._announce(ServerDropped(name=name, generation=generation, error=error, time=now, incarnation=start))

    def wait_for_fresh(self, timeout_s: float) -> None:
        """Block until a server waits for weights.

        Raises:
            WeightSyncError: none came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self.fresh), timeout_s):
                raise WeightSyncError("all servers", f"none of them returned within {timeout_s:g} s")
