"""Samples -> tensors of one micro-batch, with the weight of every trained token in the loss of its step.

Targets are shifted here, once: `targets[r, t]` is the token that the hidden state at `t` predicts, so per-token tensors
line up with the model's outputs and no later code shifts anything. The last token of a sample never predicts the first
of the next.

Weights are those of the whole step, so the gradient does not depend on packing, micro-batches or ranks: every
micro-batch adds `sum(weight * token loss)`.

| aggregation     | weight of a token of sample i in group g                                  | used by               |
|-----------------|---------------------------------------------------------------------------|-----------------------|
| sample          | 1 / B                        B = samples of the step                      | arXiv 2509.19128      |
| sample_mean     | 1 / (B * n_i)                n_i = trained tokens of the sample           | GRPO, arXiv 2402.03300|
| token           | 1 / N                        N = trained tokens of the step               | DAPO, arXiv 2503.14476|
| group           | 1 / (G * n_g)                G = groups, n_g = trained tokens of the group| ScaleRL "prompt" mean |
| constant_length | 1 / (B * L)                  L = constant_length_tokens                   | Dr. GRPO, 2503.20783  |
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import UNSET

from pipelinerl.records import IGNORED_LABEL, Sample

AGGREGATIONS = ("sample", "sample_mean", "token", "group", "constant_length")
PADDING_SEGMENT = -1
NO_VERSION = -1
_COUNTED = ("labels", "logprobs", "ref_logprobs", "version_spans")


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass: R rows of T positions (R = 1 if packed). Token tensors are 0 where `mask` is False.

    Attributes:
        input_ids, position_ids: [R, T] int64; positions restart at 0 for every sample.
        attention_mask: [R, T] int64, 1 for real tokens; None if packed (segments say what may attend to what).
        segment_ids: [R, T] int64, 0..num_segments-1 by sample, -1 on padding.
        targets: [R, T] int64, next token if it is trained, else -100.
        mask: [R, T] bool, `targets != -100`.
        trained: [N] int64, positions in the flattened row-major tensors where `mask` is True. Computed on the CPU: on
            a GPU the host would wait for it.
        old_logprobs: [R, T] float32, log-prob of the target under the policy that sampled it.
        ref_logprobs: the same under the frozen reference model, or None.
        advantages: [R, T] float32; from `collate`, those of the group stage, before `finetune/step.py`.
        weights: [R, T] float32, weight of the token in the step's loss (see the table above).
        versions: [R, T] int64, policy version that sampled the target, -1 where nothing is trained.
        oldest_versions: the same, the oldest of the whole sample: its KV cache remains in use after an update.
        num_segments: samples in this micro-batch; 0 for a sentinel.
        step_tokens: trained tokens of the whole step (over all micro-batches and ranks).
        indices: of these samples in the step.
        token_rewards: [R, T] float32, reward of each token in addition to its sample's (KL with `gae`), or None.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    segment_ids: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    trained: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    versions: torch.Tensor
    oldest_versions: torch.Tensor
    num_segments: int
    step_tokens: int
    indices: tuple[int, ...]
    token_rewards: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included, padding excluded."""
        return int((self.segment_ids != PADDING_SEGMENT).sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


def token_weights(
    samples: Sequence[Sample], aggregation: str = "sample", constant_length: int | None = None
) -> list[float]:
    """Weight of every trained token of each sample of a step (see the table above)."""
    count, tokens = max(len(samples), 1), [sample.num_trained_tokens for sample in samples]
    if aggregation == "sample":
        return [1.0 / count] * len(tokens)
    if aggregation == "sample_mean":
        return [1.0 / (count * max(n, 1)) for n in tokens]
    if aggregation == "token":
        return [1.0 / max(sum(tokens), 1)] * len(tokens)
    if aggregation == "group":
        per_group: Counter[str] = Counter()
        for sample in samples:
            per_group[sample.group_id] += sample.num_trained_tokens
        return [1.0 / (len(per_group) * max(per_group[sample.group_id], 1)) for sample in samples]
    assert aggregation == "constant_length" and constant_length is not None
    return [1.0 / (count * constant_length)] * len(tokens)


def collate(
    samples: Sequence[Sample], indices: Sequence[int], *, weights: Sequence[float], packed: bool, pad_id: int
) -> MicroBatch:
    """Build the micro-batch of `indices`.

    Args:
        samples: all samples of the step.
        indices: those of this micro-batch (one entry of the plan).
        weights: `token_weights` of all samples.
        packed: one row with restarting positions, or padded rows.
        pad_id: padding token (any valid id; padding is neither attended to nor trained).

    Raises:
        ValueError: lengths of a sample disagree, its first token is marked as trained, it has no advantage, or only
            some samples have reference log-probs.
    """
    step_tokens = sum(sample.num_trained_tokens for sample in samples)
    if not indices:
        return sentinel(pad_id=pad_id, step_tokens=step_tokens)
    chosen = [samples[index] for index in indices]
    _refuse_other_inputs(chosen)
    with_ref = _all_or_none_have_reference(chosen)
    columns = _token_columns(chosen, [weights[index] for index in indices])
    padding = {"input_ids": pad_id, "segment_ids": PADDING_SEGMENT, "targets": IGNORED_LABEL}
    padding |= {"versions": NO_VERSION, "oldest_versions": NO_VERSION}
    at = (0, slice(None)) if packed else (columns["segment_ids"], columns["position_ids"])
    lengths = [len(sample.input_ids) for sample in chosen]
    shape = (1, sum(lengths)) if packed else (len(chosen), max(lengths))

    def placed(values: np.ndarray, fill: int) -> torch.Tensor:
        out: np.ndarray = np.full(shape, fill, dtype=values.dtype)
        out[at] = values
        return torch.from_numpy(out)

    tensors = {name: placed(values, padding.get(name, 0)) for name, values in columns.items()}
    segment_ids, mask = tensors["segment_ids"], tensors["targets"] != IGNORED_LABEL
    ref_logprobs = tensors.pop("ref_logprobs")
    return MicroBatch(
        attention_mask=None if packed else (segment_ids != PADDING_SEGMENT).to(torch.int64),
        mask=mask,
        trained=positions_of(mask),
        ref_logprobs=ref_logprobs if with_ref else None,
        num_segments=len(chosen),
        step_tokens=step_tokens,
        indices=tuple(indices),
        **tensors,
    )


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Flat positions [N] int64 where `mask` is True. On a GPU this synchronizes with the host."""
    return mask.reshape(-1).nonzero(as_tuple=True)[0]


def sentinel(*, pad_id: int, step_tokens: int = 0) -> MicroBatch:
    """A micro-batch that trains nothing, which keeps collectives in step on ranks with fewer micro-batches.

    Its loss and all gradients are exactly zero.
    """
    shape = (1, 2)
    zeros = torch.zeros(shape)
    return MicroBatch(
        input_ids=torch.full(shape, pad_id),
        position_ids=torch.arange(2).unsqueeze(0),
        attention_mask=None,
        segment_ids=torch.zeros(shape, dtype=torch.int64),
        targets=torch.full(shape, IGNORED_LABEL),
        mask=torch.zeros(shape, dtype=torch.bool),
        trained=torch.zeros(0, dtype=torch.int64),
        old_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros.clone(),
        weights=zeros.clone(),
        versions=torch.full(shape, NO_VERSION),
        oldest_versions=torch.full(shape, NO_VERSION),
        num_segments=0,
        step_tokens=step_tokens,
        indices=(),
    )


def _token_columns(samples: Sequence[Sample], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Arrays with one value per token, of all samples one after the other. Position t predicts token t + 1; the last
    one of a sample predicts nothing."""
    for sample in samples:
        _check(sample)
    lengths, counts = [len(sample.input_ids) for sample in samples], [len(sample.logprobs) for sample in samples]
    total, num_trained = sum(lengths), sum(counts)
    starts = np.cumsum([0, *lengths[:-1]])
    labels = _flat((sample.labels for sample in samples), np.int64, total)
    trained = np.flatnonzero(labels != IGNORED_LABEL)
    at, spans = trained - 1, [span for sample in samples for span in sample.version_spans]
    refs = (sample.ref_logprobs or [0.0] * len(sample.logprobs) for sample in samples)
    versions = np.repeat([span.version for span in spans], [span.end - span.start for span in spans])
    oldest = [min((s.version for s in sample.version_spans if s.end > s.start), default=0) for sample in samples]

    def scatter(values: Any, fill: int, dtype: type) -> np.ndarray:
        out: np.ndarray = np.full(total, fill, dtype=dtype)
        out[at] = values
        return out

    return {
        "input_ids": _flat((sample.input_ids for sample in samples), np.int64, total),
        "position_ids": np.arange(total) - np.repeat(starts, lengths),
        "segment_ids": np.repeat(np.arange(len(samples)), lengths),
        "targets": scatter(labels[trained], IGNORED_LABEL, np.int64),
        "old_logprobs": scatter(_flat((sample.logprobs for sample in samples), np.float64, num_trained), 0, np.float32),
        "ref_logprobs": scatter(_flat(refs, np.float64, num_trained), 0, np.float32),
        "advantages": scatter(np.repeat([sample.advantage for sample in samples], counts), 0, np.float32),
        "weights": scatter(np.repeat(weights, counts), 0, np.float32),
        "versions": scatter(versions, NO_VERSION, np.int64),
        "oldest_versions": scatter(np.repeat(oldest, counts), NO_VERSION, np.int64),
    }


def _flat(parts: Iterable[Sequence[float]], dtype: type, count: int) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(parts), dtype, count)


def _check(sample: Sample) -> None:
    trained = len(sample.labels) - sample.labels.count(IGNORED_LABEL)
    expected = (len(sample.input_ids), trained, trained, trained)
    spanned = sum(span.end - span.start for span in sample.version_spans)
    found = (len(sample.labels), len(sample.logprobs), len(sample.ref_logprobs or sample.logprobs), spanned)
    if found != expected:
        got, wanted = (dict(zip(_COUNTED, numbers, strict=True)) for numbers in (found, expected))
        raise ValueError(f"sample {sample.id}: got lengths {got}, expected {wanted}")
    if sample.labels and sample.labels[0] != IGNORED_LABEL:
        raise ValueError(f"sample {sample.id}: the first token is marked as trained, but nothing predicts it")
    if sample.advantage is None:
        raise ValueError(f"sample {sample.id}: got no advantage, expected that of its group")


def _refuse_other_inputs(chosen: Sequence[Sample]) -> None:
    """Reject samples with inputs that this trainer does not pass to the model."""
    for sample in chosen:
        if sample.routed_experts is not UNSET or sample.multimodal is not UNSET:
            raise ValueError(
                f"sample {sample.id} has routed experts or multimodal inputs, expected tokens alone: this version of "
                "pipelinerl cannot train on them"
            )


def _all_or_none_have_reference(chosen: Sequence[Sample]) -> bool:
    have = [bool(sample.ref_logprobs) for sample in chosen if sample.num_trained_tokens]
    if any(have) and not all(have):
        raise ValueError(f"{have.count(False)} of {len(have)} samples have no ref_logprobs, expected all or none")
    return bool(have) and all(have)
