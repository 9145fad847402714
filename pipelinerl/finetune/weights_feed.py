"""Hands a version of the weights to the servers and verifies it. Called by the loop of every rank after a step.

Rank 0 publishes; the other ranks take part in gathering a sharded model and in the probe's forward pass. Waits for the
servers (the publisher's time-outs). A server that could not be given the weights is dropped, and the launcher told: it
samples no more. Without a `ServerPool` (nobody would start it again) it ends the run with its error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.packing_check import token_batch
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.server_pool import ServerPool
from pipelinerl.weights.source import CollectiveSource, WeightSource
from pipelinerl.weights.sync import UpdateReport
from pipelinerl.weights.verify import ProbeResult, ProbeSequence

logger = logging.getLogger(__name__)

# Mean |log-prob difference| in nats beyond which trainer and server do not run the same weights, by the coarser
# rounding of the two: fp32 has 23 bits of mantissa, TF32 and float16 have 10, bfloat16 has 7. Text that the model would
# hardly say itself differs most: 0.12 was seen in bf16 on answers that had to go on behind their end.
PROBE_TOLERANCE = {"float32": 1e-3, "tf32": 0.03, "float16": 0.03, "bfloat16": 0.25}
# Servers write NaN and -inf as -9999.
_UNUSABLE_NATS = 9000.0


def probe_tolerance(computed: torch.dtype, tf32: bool, server: str | None) -> float:
    """Mean |log-prob difference| in nats that rounding explains.

    Args:
        computed: dtype of the trainer's products, in TF32 if `tf32`.
        server: dtype of the server (None: the trainer's).
    """
    trainer = "tf32" if tf32 else str(computed).removeprefix("torch.")
    return max(PROBE_TOLERANCE.get(name, PROBE_TOLERANCE["bfloat16"]) for name in (trainer, server or trainer))


class Publisher(Protocol):
    """The part of `WeightPublisher` that the trainer uses (rank 0 only)."""

    def publish(self, version: int, source: WeightSource, names: Collection[str] | None = None) -> UpdateReport: ...

    def probe(self, sequences: Sequence[ProbeSequence], names: Collection[str] | None = None) -> ProbeResult: ...


@dataclass(frozen=True)
class Delivery:
    """One update as the loop sees it. On ranks other than the first, numbers of servers and bytes are 0."""

    version: int
    seconds: dict[str, float]
    num_servers: int
    probe_abs_diff: float | None
    total_s: float
    sent_bytes: int = 0


class WeightsFeed:
    """Sends versions of the weights.

    Args:
        publisher: connected to all servers; None on other ranks.
        wire_dtype: dtype in which weights travel (the servers' own).
        pool: which servers come and go (rank 0); None: a server that fails ends the run.
        join_tokens: tokens that a server is probed with which joins in mid run.
        return_timeout_s: how long to wait for a server that takes the final weights.
        sends_adapter: servers have the frozen model themselves, and get the adapter alone.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: Ranks,
        publisher: Publisher | None,
        wire_dtype: torch.dtype,
        pool: ServerPool | None = None,
        join_tokens: Sequence[Sequence[int]] = (),
        return_timeout_s: float = 0.0,
        sends_adapter: bool = False,
    ) -> None:
        self._backend = backend
        self._ranks = ranks
        self._publisher = publisher
        self._wire_dtype = wire_dtype
        self._pool = pool
        self._join_tokens = join_tokens
        self.return_timeout_s = return_timeout_s
        self._source_of = backend.adapter_source if sends_adapter else backend.weight_source
        self._told = False

    @property
    def has_fresh(self) -> bool:
        """Whether a server waits for its first weights (rank 0 knows)."""
        return self._pool is not None and bool(self._pool.fresh)

    def send(self, version: int, probe_tokens: Sequence[Sequence[int]] = (), required: bool = False) -> Delivery:
        """Give all servers the present weights as `version`; compare log-probs of `probe_tokens` if there are any.

        Args:
            version: the step behind the weights.
            probe_tokens: tokens to compare with all servers.
            required: a server has to have them in the end: wait until one is there.

        Raises:
            WeightSyncError: a server could not be given the weights and there is no pool; or it disagrees beyond the
                dtype's tolerance; or none came back to take the final weights.
        """
        start = time.perf_counter()
        generations = self._pool.generations() if self._pool else {}
        report = self._publish(version)
        while self._ranks.broadcast(int(required and self._pool is not None and not (report and report.updated))):
            if self._pool is not None:
                self._pool.wait_for_fresh(self.return_timeout_s)
                generations = self._pool.generations()
            report = self._publish(version)
        difference = self._verify(version, report, generations, probe_tokens)
        return Delivery(
            version=version,
            seconds=report.seconds if report else {},
            num_servers=report.num_servers if report else 0,
            probe_abs_diff=difference,
            total_s=time.perf_counter() - start,
            sent_bytes=report.sent_bytes if report else 0,
        )

    def send_to_fresh(self, version: int) -> None:
        """Give the servers that wait for their first weights the present ones; the others are left alone."""
        pool = self._pool
        generations = pool.generations() if pool else {}
        report = self._publish(version, pool.fresh if pool else ())
        self._verify(version, report, generations, ())

    def _publish(self, version: int, names: Collection[str] | None = None) -> UpdateReport | None:
        source = self._source_of(self._wire_dtype)
        if self._publisher is None:
            if isinstance(source, CollectiveSource):
                source.follow()
            return None
        generations = self._pool.generations() if self._pool else {}
        try:
            # Without a pool everybody is meant, always.
            report = self._publisher.publish(version, source, *(() if names is None else (names,)))
        finally:
            if isinstance(source, CollectiveSource):
                source.done()
        for server, error in report.failed.items():
            if self._pool is None:
                raise WeightSyncError(server, f"could not be given version {version}: {error}")
            self._pool.drop(server, generations.get(server), f"could not be given version {version}: {error}")
        if not report.updated and self._pool is None:
            raise WeightSyncError("all servers", f"no server took version {version}")
        return report

    def _verify(
        self,
        version: int,
        report: UpdateReport | None,
        generations: dict[str, int],
        probe_tokens: Sequence[Sequence[int]],
    ) -> float | None:
        """Probe all servers with `probe_tokens`, if any; else those that are fresh. All ranks call it."""
        pool, fresh = self._pool, set[str]()
        if pool is not None and report is not None:
            fresh = {update.name for update in report.updated} & set(pool.fresh)
        if not self._ranks.broadcast(int(bool(probe_tokens) or bool(fresh))):
            return None
        sequences = self._trainer_logprobs(probe_tokens or self._join_tokens)
        if self._publisher is None:
            return None
        if pool is None:
            whole = self._publisher.probe(sequences)
            _log(version, [whole])
            return self._checked(version, whole)
        names = [update.name for update in report.updated] if report and probe_tokens else sorted(fresh)
        results = []
        for name in names:
            result = self._probe_one(version, name, generations, sequences, name in fresh)
            if result is not None:
                results.append(result)
        return _log(version, results) if results else None

    def _probe_one(
        self,
        version: int,
        name: str,
        generations: dict[str, int],
        sequences: Sequence[ProbeSequence],
        is_fresh: bool,
    ) -> ProbeResult | None:
        """Compare with one server; None if it was dropped."""
        assert self._pool is not None and self._publisher is not None
        generation = generations.get(name)
        try:
            result = self._publisher.probe(sequences, [name])
        except WeightSyncError as error:
            self._pool.drop(name, generation, str(error))
            return None
        try:
            mean = self._checked(version, result)
        except WeightSyncError as error:
            if self._pool.generations().get(name) != generation:
                return None  # it was started again since the update: the next one is about it
            if not is_fresh or self._pool.is_first_start(name, generation):
                raise
            self._pool.drop(name, generation, str(error))
            return None
        if is_fresh and generation is not None:
            self._pool.ready(name, generation, version, mean)
        return result

    def _checked(self, version: int, result: ProbeResult) -> float:
        """The mean difference; WeightSyncError if a server's is beyond the tolerance."""
        policy = self._backend.policy
        self._compare_dtypes(result)
        for server, mean in result.per_server_mean.items():
            tolerance = probe_tolerance(policy.compute_dtype, policy.tf32, result.server_dtypes.get(server))
            if not mean <= tolerance:
                reason = "it does not run the weights that it was sent"
                if result.max_abs_diff > _UNUSABLE_NATS:
                    reason = (
                        "it answers NaN or -inf; in float16 the activations of some models overflow, "
                        "for those use vllm_config.vllm_kwargs.dtype=bfloat16"
                    )
                raise WeightSyncError(
                    server,
                    f"after the update to version {version} its log-probs differ from the trainer's by {mean:.3g} nats "
                    f"on average, expected at most {tolerance:g}: {reason}",
                )
        return result.mean_abs_diff

    def _compare_dtypes(self, result: ProbeResult) -> None:
        """A warning, once, if servers hold their weights in another dtype than the trainer computes with."""
        expected = str(self._wire_dtype).removeprefix("torch.")
        others = {server: dtype for server, dtype in result.server_dtypes.items() if dtype != expected}
        # With bf16 products the weights are those of bf16 whatever the servers could hold.
        if others and not self._told and self._backend.policy.compute_dtype == torch.float32:
            self._told = True
            server, dtype = next(iter(others.items()))
            logger.warning(
                "%s holds its weights in %s, the trainer computes with values of %s: they follow policies that differ "
                "by rounding. Name the dtype: vllm_config.vllm_kwargs.dtype=%s",
                server,
                dtype,
                expected,
                dtype,
            )

    @torch.no_grad()
    def _trainer_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[ProbeSequence]:
        """The trainer's log-probs at temperature 1 (what servers report for given tokens). All ranks compute them."""
        batch = token_batch(tokens, torch.device("cpu"))
        layout = self._backend.policy.layout_of(batch)
        layout = layout.to(self._ranks.device) if layout is not None else None
        row = self._backend.forward(batch.to(self._ranks.device), layout, 1.0).logprobs[0].tolist()
        sequences, start = [], 0
        for ids in tokens:
            sequences.append(ProbeSequence(list(ids), row[start : start + len(ids) - 1]))
            start += len(ids)
        return sequences


def _log(version: int, results: Sequence[ProbeResult]) -> float:
    """One line on all servers, which may have been asked one by one. Returns the mean difference in nats."""
    tokens = sum(result.num_tokens for result in results)
    mean = sum(result.mean_abs_diff * result.num_tokens for result in results) / tokens
    servers = [name for result in results for name in result.per_server_mean]
    logger.info(
        "version %d: trainer and %s differ by %.2g nats on average (%.2g at most, %d tokens)",
        version,
        servers[0] if len(servers) == 1 else f"{len(servers)} servers",
        mean,
        max(result.max_abs_diff for result in results),
        tokens,
    )
    return mean
