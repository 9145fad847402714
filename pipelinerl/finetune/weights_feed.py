"""Hands a version of the weights to the servers and verifies it. Called by the loop of every rank after a step.

Rank 0 publishes; the other ranks take part in gathering a sharded model and in the probe's forward pass. Waits for the
servers (the publisher's time-outs). A server that could not be given the weights ends the run with its error: half of
the fleet on old weights would train on data that nobody asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.packing_check import token_batch
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.weights.report import UpdateReport
from pipelinerl.weights.source import CollectiveSource, WeightSource
from pipelinerl.weights.verify import ProbeResult, ProbeSequence

logger = logging.getLogger(__name__)

# Mean |log-prob difference| in nats beyond which trainer and server do not run the same weights.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class Publisher(Protocol):
    """The part of `WeightPublisher` that the trainer uses (rank 0 only)."""

    def publish(self, version: int, source: WeightSource) -> UpdateReport: ...

    def probe(self, sequences: Sequence[ProbeSequence]) -> ProbeResult: ...


@dataclass(frozen=True)
class Delivery:
    """One update as the loop sees it. On ranks other than the first, numbers of servers are 0."""

    version: int
    seconds: dict[str, float]
    num_servers: int
    probe_abs_diff: float | None
    total_s: float


class WeightsFeed:
    """Sends versions and remembers which one the servers have.

    Args:
        publisher: connected to all servers; None on other ranks.
        wire_dtype: dtype in which weights travel (the servers' own).
    """

    def __init__(self, backend: Backend, ranks: Ranks, publisher: Publisher | None, wire_dtype: torch.dtype) -> None:
        self._backend = backend
        self._ranks = ranks
        self._publisher = publisher
        self._wire_dtype = wire_dtype

    def send(self, version: int, probe_tokens: Sequence[Sequence[int]] = ()) -> Delivery:
        """Give all servers the present weights as `version`; compare log-probs of `probe_tokens` if there are any.

        Raises:
            WeightSyncError: a server could not be given the weights, or disagrees beyond the dtype's tolerance.
        """
        start = time.perf_counter()
        report = self._publish(version)
        difference = self._probe(version, probe_tokens) if probe_tokens else None
        return Delivery(
            version=version,
            seconds=report.seconds if report else {},
            num_servers=report.num_servers if report else 0,
            probe_abs_diff=difference,
            total_s=time.perf_counter() - start,
        )

    def _publish(self, version: int) -> UpdateReport | None:
        source = self._backend.weight_source(self._wire_dtype)
        if self._publisher is None:
            if isinstance(source, CollectiveSource):
                source.follow()
            return None
        try:
            report = self._publisher.publish(version, source)
        finally:
            if isinstance(source, CollectiveSource):
                source.done()
        for server, error in report.failed.items():
            raise WeightSyncError(server, f"could not be given version {version}: {error}")
        if not report.updated:
            raise WeightSyncError("all servers", f"no server took version {version}")
        return report

    def _probe(self, version: int, tokens: Sequence[Sequence[int]]) -> float | None:
        sequences = self._trainer_logprobs(tokens)
        if self._publisher is None:
            return None
        result = self._publisher.probe(sequences)
        tolerance = PROBE_TOLERANCE.get(self._backend.policy.compute_dtype, 0.1)
        logger.info(
            "version %d: trainer and %d servers differ by %.2g nats on average (%.2g at most, %d tokens)",
            version,
            len(result.per_server_mean),
            result.mean_abs_diff,
            result.max_abs_diff,
            result.num_tokens,
        )
        for server, mean in result.per_server_mean.items():
            if not mean <= tolerance:
                raise WeightSyncError(
                    server,
                    f"after the update to version {version} its log-probs differ from the trainer's by {mean:.3g} nats "
                    f"on average, expected at most {tolerance:g}: it does not run the weights that it was sent",
                )
        return result.mean_abs_diff

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
