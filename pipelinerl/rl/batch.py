"""Samples -> tensors of one micro-batch. Called by every trainer rank for each entry of its plan; waits for nothing.

Targets are shifted here, once: `targets[r, t]` is the token that the hidden state at `t` predicts, so every per-token
tensor lines up with the model's outputs and no later code shifts anything. The last token of one sample never
predicts the first of the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipelinerl.records import IGNORED_LABEL, ScoredSample
from pipelinerl.rl.aggregation import StepScale
from pipelinerl.rl.sample_check import check_sample

PADDING_SEGMENT = -1
NO_VERSION = -1
_NEWEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass: R rows of T positions (R = 1 if packed). Token tensors are 0 where `mask` is False.

    Attributes:
        input_ids, position_ids: [R, T] int64; positions restart at 0 for every sample.
        attention_mask: [R, T] int64, 1 for real tokens; None if packed (segments say what may attend to what).
        segment_ids: [R, T] int64, 0..num_segments-1 by sample, -1 on padding.
        targets: [R, T] int64, next token if it is trained, else -100.
        mask: [R, T] bool, `targets != -100`.
        trained: [N] int64, where `mask` is True in the flattened row-major tensors. Worked out here, because on a GPU
            looking for them makes the host wait.
        old_logprobs: [R, T] float32, log-prob of the target under the policy that sampled it.
        ref_logprobs: the same under the frozen reference model, or None.
        advantages: [R, T] float32.
        weights: [R, T] float32, weight of the token in the step's loss (see `rl/aggregation.py`).
        versions: [R, T] int64, policy version that sampled the target, -1 where nothing is trained.
        oldest_versions: the same, the oldest of the whole sample: what came before an update stays in the cache of keys
            and values that later tokens were sampled with.
        rewards: [num_segments] float32.
        num_segments: samples in this micro-batch; 0 for a sentinel.
        step_tokens: trained tokens of the whole step (over all micro-batches and ranks).
        indices: which samples of the step these are.
        token_rewards: [R, T] float32, what a token earns besides the reward of its sample; None: nothing.
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
    rewards: torch.Tensor
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


@dataclass(frozen=True)
class _Row:
    """One sample as arrays that line up with its tokens; the last position predicts nothing."""

    input_ids: np.ndarray
    targets: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    advantages: np.ndarray
    token_rewards: np.ndarray
    versions: np.ndarray
    oldest_versions: np.ndarray
    weight: float
    segment: int

    def filled(self, value: float) -> np.ndarray:
        return np.full(len(self.input_ids), value)


def collate(
    samples: Sequence[ScoredSample], indices: Sequence[int], *, scale: StepScale, packed: bool, pad_id: int
) -> MicroBatch:
    """Build the micro-batch of `indices`.

    Args:
        samples: all samples of the step.
        indices: those of this micro-batch (one entry of the plan).
        scale: `step_scale(samples, ...)`, computed once per step.
        packed: one row with restarting positions, or padded rows.
        pad_id: token of padding (any valid id; padding is never attended to or trained).

    Raises:
        ValueError: lengths of a sample disagree, its first token is marked as trained, or only some samples have
            reference log-probs.
    """
    if not indices:
        return sentinel(pad_id=pad_id, step_tokens=scale.num_tokens)
    chosen = [samples[index] for index in indices]
    with_ref = _all_or_none_have_reference(chosen)
    rows = [
        _row(scored, scale.token_weights[index], segment)
        for segment, (index, scored) in enumerate(zip(indices, chosen, strict=True))
    ]
    lines = [rows] if packed else [[row] for row in rows]
    width = max(sum(len(row.input_ids) for row in line) for line in lines)
    targets = _tensor(lines, width, lambda row: row.targets, IGNORED_LABEL, np.int64)
    segment_ids = _tensor(lines, width, lambda row: row.filled(row.segment), PADDING_SEGMENT, np.int64)
    ref = _tensor(lines, width, lambda row: row.ref_logprobs, 0.0, np.float32) if with_ref else None
    earns = any(scored.token_rewards for scored in chosen)
    mask = targets != IGNORED_LABEL
    weights = _tensor(lines, width, lambda row: row.filled(row.weight), 0.0, np.float32)
    return MicroBatch(
        input_ids=_tensor(lines, width, lambda row: row.input_ids, pad_id, np.int64),
        position_ids=_tensor(lines, width, lambda row: np.arange(len(row.input_ids)), 0, np.int64),
        attention_mask=None if packed else (segment_ids != PADDING_SEGMENT).to(torch.int64),
        segment_ids=segment_ids,
        targets=targets,
        mask=mask,
        trained=positions_of(mask),
        old_logprobs=_tensor(lines, width, lambda row: row.old_logprobs, 0.0, np.float32),
        ref_logprobs=ref,
        advantages=_tensor(lines, width, lambda row: row.advantages, 0.0, np.float32),
        weights=weights * mask,
        versions=_tensor(lines, width, lambda row: row.versions, NO_VERSION, np.int64),
        oldest_versions=_tensor(lines, width, lambda row: row.oldest_versions, NO_VERSION, np.int64),
        rewards=torch.tensor([scored.sample.reward for scored in chosen], dtype=torch.float32),
        num_segments=len(chosen),
        step_tokens=scale.num_tokens,
        indices=tuple(indices),
        token_rewards=_tensor(lines, width, lambda row: row.token_rewards, 0.0, np.float32) if earns else None,
    )


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Flat positions [N] int64 where `mask` is True. On a GPU the host waits for everything before it."""
    return mask.reshape(-1).nonzero(as_tuple=True)[0]


def sentinel(*, pad_id: int, step_tokens: int = 0, with_reference: bool = False) -> MicroBatch:
    """A micro-batch that trains nothing: for ranks that have fewer micro-batches than others, so that collectives stay
    in step. Its loss and every gradient are exactly zero."""
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
        ref_logprobs=zeros.clone() if with_reference else None,
        advantages=zeros.clone(),
        weights=zeros.clone(),
        versions=torch.full(shape, NO_VERSION),
        oldest_versions=torch.full(shape, NO_VERSION),
        rewards=torch.zeros(0),
        num_segments=0,
        step_tokens=step_tokens,
        indices=(),
    )


def _tensor(
    lines: Sequence[Sequence[_Row]], width: int, values: Callable[[_Row], np.ndarray], padding: float, dtype: type
) -> torch.Tensor:
    out: np.ndarray = np.full((len(lines), width), padding, dtype=dtype)
    for position, line in enumerate(lines):
        flat = np.concatenate([values(row) for row in line])
        out[position, : len(flat)] = flat
    return torch.from_numpy(out)


def _row(scored: ScoredSample, weight: float, segment: int) -> _Row:
    sample = scored.sample
    trained = check_sample(sample)
    advantages = scored.advantages
    if len(advantages) not in (1, len(trained)):
        raise ValueError(
            f"sample {sample.id}: {len(advantages)} advantages for {len(trained)} trained tokens, expected 1 or as many"
        )
    if scored.token_rewards and len(scored.token_rewards) != len(trained):
        raise ValueError(
            f"sample {sample.id}: {len(scored.token_rewards)} token_rewards for {len(trained)} trained tokens"
        )
    length = len(sample.input_ids)
    # Position t predicts token t + 1.
    at = np.asarray(trained, dtype=np.int64) - 1
    lengths = [span.end - span.start for span in sample.version_spans]
    versions = np.repeat(np.asarray([span.version for span in sample.version_spans], dtype=np.int64), lengths)
    targets = np.full(length, IGNORED_LABEL, dtype=np.int64)
    targets[:-1] = sample.labels[1:]
    return _Row(
        input_ids=np.asarray(sample.input_ids, dtype=np.int64),
        targets=targets,
        old_logprobs=_scatter(sample.logprobs, at, length, 0.0),
        ref_logprobs=_scatter(sample.ref_logprobs, at, length, 0.0) if sample.ref_logprobs else np.zeros(length),
        # One value stands for all trained tokens.
        advantages=_scatter(advantages, at, length, 0.0),
        token_rewards=_scatter(scored.token_rewards, at, length, 0.0) if scored.token_rewards else np.zeros(length),
        versions=_scatter(versions, at, length, NO_VERSION),
        oldest_versions=_scatter(np.full(len(at), versions.min(initial=_NEWEST)), at, length, NO_VERSION),
        weight=weight,
        segment=segment,
    )


def _scatter(values: Sequence[float] | np.ndarray, at: np.ndarray, length: int, fill: float) -> np.ndarray:
    dtype = np.int64 if isinstance(fill, int) else np.float64
    out = np.full(length, fill, dtype=dtype)
    out[at] = values
    return out


def _all_or_none_have_reference(chosen: Sequence[ScoredSample]) -> bool:
    have = [bool(scored.sample.ref_logprobs) for scored in chosen if scored.sample.num_trained_tokens]
    if any(have) and not all(have):
        raise ValueError(f"{have.count(False)} of {len(have)} samples have no ref_logprobs, expected all or none")
    return bool(have) and all(have)
