"""The probe after an update, as the trainer sees it: which tokens, its own log-probs of them, and how far those of a
server may be off. `WeightPublisher.probe` asks the servers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from pipelinerl.config.run import RunConfig
from pipelinerl.config.schedule import update_interval
from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.backends.base import Backend
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.records import Sample
from pipelinerl.weights.sync import ProbeResult, ProbeSequence

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


class Probe:
    """Compares the trainer with servers.

    Args:
        backend: whose policy the servers run.
        ranks: of the trainer.
        packed: sequences share a row, as samples do in training; False: each has a forward pass of its own.
    """

    def __init__(self, backend: Backend, ranks: Ranks, packed: bool = True) -> None:
        self._backend = backend
        self._ranks = ranks
        self._packed = packed
        self._has_warned = False

    @torch.no_grad()
    def sequences(self, tokens: Sequence[Sequence[int]]) -> list[ProbeSequence]:
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

    def check(self, version: int, server: str, result: ProbeResult) -> None:
        """WeightSyncError if the mean difference is beyond the tolerance."""
        policy = self._backend.policy
        self._compare_dtypes(server, result.server_dtype)
        tolerance = probe_tolerance(policy.compute_dtype, policy.tf32, result.server_dtype)
        # Written so that NaN is refused.
        if not result.mean_abs_diff <= tolerance:
            reason = "it does not run the weights that it was sent"
            if result.max_abs_diff > _UNUSABLE_NATS:
                reason = (
                    "it answers NaN or -inf; in float16 the activations of some models overflow, "
                    "for those use vllm_config.vllm_kwargs.dtype=bfloat16"
                )
            raise WeightSyncError(
                server,
                f"after the update to version {version} its log-probs differ from the trainer's by "
                f"{result.mean_abs_diff:.3g} nats on average, expected at most {tolerance:g}: {reason}",
            )

    def _compare_dtypes(self, server: str, dtype: str | None) -> None:
        """Warn once if a server holds its weights in another dtype than the trainer computes with."""
        policy = self._backend.policy
        expected = str(policy.served_dtype).removeprefix("torch.")
        # With bf16 products the weights are those of bf16 whatever the servers could hold.
        if dtype in (None, expected) or self._has_warned or policy.compute_dtype != torch.float32:
            return
        self._has_warned = True
        logger.warning(
            "%s holds its weights in %s but the trainer computes with values of %s: they follow policies that differ "
            "by rounding. Name the dtype: vllm_config.vllm_kwargs.dtype=%s",
            server,
            dtype,
            expected,
            dtype,
        )


def log_results(version: int, results: Mapping[str, ProbeResult]) -> float:
    """One line on all servers. Returns the mean difference in nats."""
    tokens = sum(result.num_tokens for result in results.values())
    mean = sum(result.mean_abs_diff * result.num_tokens for result in results.values()) / tokens
    logger.info(
        "version %d: trainer and %s differ by %.2g nats on average (%.2g at most, %d tokens)",
        version,
        next(iter(results)) if len(results) == 1 else f"{len(results)} servers",
        mean,
        max(result.max_abs_diff for result in results.values()),
        tokens,
    )
    return mean
