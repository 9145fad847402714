"""When the servers get the trainer's weights; gives them those and verifies them. Every rank takes part.

Rank 0 publishes; the other ranks take part in gathering a sharded model and in the probe's forward pass. A server that
could not be updated is dropped and reported to the launcher, and samples no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from pipelinerl.config.run import RunConfig
from pipelinerl.config.schedule import update_interval
from pipelinerl.errors import ConfigError, WeightSyncError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.packing_check import token_batch
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.server_pool import ServerPool
from pipelinerl.records import Sample
from pipelinerl.weights.buffers import CollectiveSource
from pipelinerl.weights.manifest import adapter_problems, coverage_problems, local_folder, read_manifest
from pipelinerl.weights.sync import UpdateReport
from pipelinerl.weights.verify import ProbeResult, ProbeSequence

logger = logging.getLogger(__name__)

# Mean |log-prob difference| in nats above which trainer and server do not run the same weights, by the coarser rounding
# of the two: fp32 has 23 bits of mantissa, TF32 and float16 have 10, bfloat16 has 7. Text that the model would hardly
# generate itself differs most: 0.12 was seen in bf16 on answers that were forced to continue past their end.
PROBE_TOLERANCE = {"float32": 1e-3, "tf32": 0.03, "float16": 0.03, "bfloat16": 0.25}
# Servers write NaN and -inf as -9999.
_UNUSABLE_NATS = 9000.0
_PROBE_SEQUENCES = 4
_PROBE_TOKENS = 256
_PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Two numbers add up to 42; the first is 17, so the second is 25.",
    "To find a number between 1 and 100, guess the middle of what is left.",
)


def update_is_due(config: RunConfig, step: int, is_last: bool = False) -> bool:
    """Whether the servers get the weights of `step`. From the configuration and the step alone: all ranks agree, and a
    resumed run keeps the rhythm."""
    return config.finetune.send_weight_updates and (is_last or step % update_interval(config) == 0)


def probe_is_due(config: RunConfig, step: int) -> bool:
    """Whether the update of `step`, neither the first nor the last, is followed by a probe."""
    every = config.supervise.probe_every_n_updates
    return every > 0 and step // update_interval(config) % every == 0


def probe_tolerance(computed: torch.dtype, tf32: bool, server: str | None) -> float:
    """Mean |log-prob difference| in nats that rounding explains.

    Args:
        computed: dtype of the trainer's products, in TF32 if `tf32`.
        server: dtype of the server (None: the trainer's).
    """
    trainer = "tf32" if tf32 else str(computed).removeprefix("torch.")
    return max(PROBE_TOLERANCE.get(name, PROBE_TOLERANCE["bfloat16"]) for name in (trainer, server or trainer))


def text_tokens(tokenizer: Any, vocabulary_size: int) -> list[list[int]]:
    """Probe tokens before the first step: fixed sentences, or plain ids if the tokenizer makes too little of them."""
    encoded = [tokenizer.encode(text, add_special_tokens=False)[:_PROBE_TOKENS] for text in _PROBE_TEXTS]
    usable = [ids for ids in encoded if len(ids) >= 2 and len(set(ids)) > 1 and max(ids) < vocabulary_size]
    return usable or [[(7 * k + 3) % vocabulary_size for k in range(16)]]


def batch_tokens(samples: Sequence[Sample]) -> list[list[int]]:
    """Probe tokens after a step: a few samples spread over the batch, cut to a length that costs nothing."""
    stride = max(1, len(samples) // _PROBE_SEQUENCES)
    chosen = [sample.input_ids[:_PROBE_TOKENS] for sample in samples[::stride]]
    return [ids for ids in chosen if len(ids) >= 2][:_PROBE_SEQUENCES]


def check_checkpoint(backend: Backend, model_path: str) -> None:
    """Refuse a model of whose checkpoint the trainer has other tensors: servers of it could not be updated.

    Raises:
        ConfigError: names the tensors.
    """
    folder = local_folder(model_path)
    tensors = None if folder is None else read_manifest(folder)
    policy = backend.policy
    if tensors is None:
        return
    source_of = backend.adapter_source if policy.sends_adapter else backend.weight_source
    sent = {meta.name: meta.shape for meta in source_of(policy.served_dtype).metadata()}
    tied = bool(getattr(policy.language_model.config.get_text_config(), "tie_word_embeddings", False))
    if policy.sends_adapter:
        problems = adapter_problems(tensors, sent, policy.adapter_config.r)
    else:
        problems = coverage_problems(tensors, sent, tied)
    if problems:
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
        self._packed = packed
        self._backend = backend
        self._ranks = ranks
        self._pool = pool
        self._join_tokens = join_tokens
        self.return_timeout_s = return_timeout_s
        self._has_warned = False

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
        report, generations = self._publish(version)
        while self._ranks.broadcast(int(required and report is not None and not report.updated)):
            if self._pool is not None:
                self._pool.wait_for_fresh(self.return_timeout_s)
            report, generations = self._publish(version)
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
        report, generations = self._publish(version, self._pool.fresh if self._pool else ())
        self._verify(version, report, generations, ())

    def _publish(
        self, version: int, names: Collection[str] | None = None
    ) -> tuple[UpdateReport | None, dict[str, int]]:
        """Rank 0: the report, and the generation of every server that it is about. Other ranks: None."""
        policy = self._backend.policy
        source_of = self._backend.adapter_source if policy.sends_adapter else self._backend.weight_source
        source = source_of(policy.served_dtype)
        if self._pool is None:
            if isinstance(source, CollectiveSource):
                source.follow()
            return None, {}
        generations = self._pool.generations()
        try:
            report = self._pool.publisher.publish(version, source, names)
        finally:
            if isinstance(source, CollectiveSource):
                source.done()
        for server, error in report.failed.items():
            self._pool.drop(server, generations.get(server), f"could not be given version {version}: {error}")
        return report, generations

    def _verify(
        self,
        version: int,
        report: UpdateReport | None,
        generations: dict[str, int],
        probe_tokens: Sequence[Sequence[int]],
    ) -> float | None:
        """Probe all updated servers with `probe_tokens`, if any; else those that are fresh. All ranks call it.

        Returns:
            The mean difference in nats on rank 0; None if no server was probed.
        """
        pool, fresh = self._pool, set[str]()
        if pool is not None and report is not None:
            fresh = {update.name for update in report.updated} & set(pool.fresh)
        if not self._ranks.broadcast(int(bool(probe_tokens) or bool(fresh))):
            return None
        sequences = self._trainer_logprobs(probe_tokens or self._join_tokens)
        if pool is None or report is None:
            return None
        results = []
        for name in [update.name for update in report.updated if probe_tokens or update.name in fresh]:
            result = self._probe(pool, version, name, generations.get(name), sequences, name in fresh)
            if result is not None:
                results.append(result)
        return _log(version, results) if results else None

    def _probe(
        self,
        pool: ServerPool,
        version: int,
        name: str,
        generation: int | None,
        sequences: Sequence[ProbeSequence],
        is_fresh: bool,
    ) -> ProbeResult | None:
        """Compare with one server; None if it was dropped."""
        try:
            result = pool.publisher.probe(sequences, [name])
        except WeightSyncError as error:
            pool.drop(name, generation, str(error))
            return None
        try:
            self._check(version, result)
        except WeightSyncError as error:
            if pool.generations().get(name) != generation:
                return None  # it was restarted since the update; the next one is about it
            if not is_fresh or pool.is_first_start(name, generation):
                raise
            pool.drop(name, generation, str(error))
            return None
        if is_fresh and generation is not None:
            pool.ready(name, generation, version, result.mean_abs_diff)
        return result

    def _check(self, version: int, result: ProbeResult) -> None:
        """WeightSyncError if a server's mean difference is beyond the tolerance."""
        policy = self._backend.policy
        self._compare_dtypes(result)
        for server, mean in result.per_server_mean.items():
            tolerance = probe_tolerance(policy.compute_dtype, policy.tf32, result.server_dtypes.get(server))
            # Written so that NaN is refused.
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

    def _compare_dtypes(self, result: ProbeResult) -> None:
        """Warn once if servers hold their weights in another dtype than the trainer computes with."""
        policy = self._backend.policy
        expected = str(policy.served_dtype).removeprefix("torch.")
        others = {server: dtype for server, dtype in result.server_dtypes.items() if dtype != expected}
        # With bf16 products the weights are those of bf16 whatever the servers could hold.
        if others and not self._has_warned and policy.compute_dtype == torch.float32:
            self._has_warned = True
            server, dtype = next(iter(others.items()))
            logger.warning(
                "%s holds its weights in %s but the trainer computes with values of %s: they follow policies that "
                "differ by rounding. Name the dtype: vllm_config.vllm_kwargs.dtype=%s",
                server,
                dtype,
                expected,
                dtype,
            )

    @torch.no_grad()
    def _trainer_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[ProbeSequence]:
        """The trainer's log-probs at temperature 1 (what servers report for given tokens). All ranks compute them."""
        policy, device = self._backend.policy, self._ranks.device
        sequences = []
        for together in [tokens] if self._packed else [[ids] for ids in tokens]:
            batch, layout = policy.placed(token_batch(together, torch.device("cpu")), device)
            row = iter(self._backend.forward(batch, layout, 1.0).logprobs[0].tolist())
            for ids in together:
                *logprobs, _ = islice(row, len(ids))  # the last token predicts nothing
                sequences.append(ProbeSequence(list(ids), logprobs))
        return sequences


def _log(version: int, results: Sequence[ProbeResult]) -> float:
    """One line on all servers, which were asked one by one. Returns the mean difference in nats."""
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
