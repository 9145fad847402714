"""Trials of a freshly loaded model: does our path match its own head, and are the log-probs of a sample the same next
to others as alone?

A trial costs a few forward passes over about 100 tokens. The expected values come from eager attention, which supports
everything that a model may have (soft-capping, sinks, windows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch

from pipelinerl.finetune.attention import HALF_PRECISION_ONLY, SEGMENTED_ATTENTION, VARLEN_ATTENTION
from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs, fp32_products, logprobs_from_logits
from pipelinerl.records import IGNORED_LABEL
from pipelinerl.rl.microbatch import PADDING_SEGMENT, MicroBatch, positions_of

#: Beyond the chunks of linear attention (64 tokens) and `_WINDOW`.
_LENGTHS = (70, 23, 9)
#: Attributes beyond which a model computes something else. During a trial they are at most these values, so that few
#: tokens and weak attention show it.
_WINDOW = 8
_THRESHOLDS = {
    "sliding_window": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "floor_scale": _WINDOW,
    "attn_logit_softcapping": 0.1,
}
#: Odd numbers above 2048 are no TF32 values.
_LARGE_POSITION = 4096
_EAGER = "eager"


@contextmanager
def exact_attention(policy: PolicyModel) -> Iterator[None]:
    """Within it the model uses eager attention, which exists in fp32; models without it are unchanged."""
    model, before = policy.language_model, policy.attention
    try:
        model.set_attn_implementation(_EAGER)
    except (ValueError, ImportError):
        yield
        return
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def low_thresholds(policy: PolicyModel) -> Iterator[None]:
    """Within it windows and chunks of the model are short and caps of attention logits low."""
    config = policy.language_model.config.get_text_config()
    before = [
        (owner, name, value)
        for owner in (config, *policy.language_model.modules())
        for name, low in _THRESHOLDS.items()
        if isinstance(value := getattr(owner, name, None), int | float) and value > low
    ]
    for owner, name, _ in before:
        setattr(owner, name, _THRESHOLDS[name])
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@torch.no_grad()
def head_is_linear(policy: PolicyModel) -> bool:
    """Whether the model's logits are the outputs of its head, unscaled and uncapped."""
    head = policy.language_model.get_output_embeddings()
    if head is None:
        return False
    made: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda module, inputs, output: made.append(output))
    try:
        ids = torch.tensor([sample_tokens(policy)[-1]], device=next(policy.parameters()).device)
        with exact_attention(policy):
            logits = policy.language_model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return all(torch.equal(output.to(logits.dtype), logits) for output in made)


@contextmanager
def exact_fp32(policy: PolicyModel) -> Iterator[None]:
    """Within it products are in fp32. An attention without fp32 is replaced by one that isolates samples the same way:
    ours by our other one, others by eager attention.

    In half precision, rounding would hide the leak of a convolution or a recurrent state.
    """
    dtype, before = policy.compute_dtype, policy.attention
    policy.compute_dtype = torch.float32
    is_half_only = before in HALF_PRECISION_ONLY
    try:
        if is_half_only:
            policy.language_model.set_attn_implementation(SEGMENTED_ATTENTION if before == VARLEN_ATTENTION else _EAGER)
        yield
    finally:
        policy.compute_dtype = dtype
        if is_half_only:
            policy.language_model.set_attn_implementation(before)


@torch.no_grad()
def packing_difference(policy: PolicyModel, packed: bool = True) -> float:
    """Largest |log-prob difference| between samples next to each other and the same samples alone.

    Neighbors have different tokens, so attention or state that crosses a border shows. `packed`: in one row; False: in
    padded rows.
    """
    samples = sample_tokens(policy)
    together = _logprobs(policy, samples, packed=packed)
    return _largest(together - torch.cat([_logprobs(policy, [sample]) for sample in samples]))


@torch.no_grad()
def sharing_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between samples whose common prefixes are computed once and the same samples alone.

    Anything but attention that mixes tokens shows: behind a prefix comes another sample's.
    """
    samples = branching_tokens(policy)
    together = _logprobs(policy, samples)
    return _largest(together - torch.cat([_logprobs(policy, [sample]) for sample in samples]))


@torch.no_grad()
def far_difference(policy: PolicyModel, packed: bool = True) -> float:
    """Largest |log-prob difference| between short samples alone and next to one at the model's last positions.

    Some models choose their frequencies by the largest position of a row.
    """
    first, *others = sample_tokens(policy)
    start = max(0, (_longest(policy) or 0) - len(first))
    beside = _logprobs(policy, [first, *others], start, packed=packed)[len(first) :]
    return _largest(beside - torch.cat([_logprobs(policy, [sample]) for sample in others]))


@torch.no_grad()
def forward_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between the policy's path (own head) and the model's plain logits."""
    sample = sample_tokens(policy)[0]
    expected = _plain_logprobs(policy, sample, policy.compute_dtype)
    return _largest(_logprobs(policy, [sample])[: len(sample) - 1] - expected)


@torch.no_grad()
def rounding_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between the model's plain logits with products in bf16 and in fp32."""
    sample = sample_tokens(policy)[0]
    rounded, exact = (_plain_logprobs(policy, sample, dtype) for dtype in (torch.bfloat16, torch.float32))
    return _largest(rounded - exact)


def _plain_logprobs(policy: PolicyModel, sample: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Log-probs of all tokens of `sample` but the first, by the model's own head and eager attention."""
    ids = torch.tensor([sample], device=next(policy.parameters()).device)
    is_bf16 = dtype == torch.bfloat16
    in_bf16 = torch.autocast(ids.device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False)
    with exact_attention(policy), in_bf16:
        logits = policy.language_model(input_ids=ids, use_cache=False).logits
    return logprobs_from_logits(logits[0, :-1], ids[0, 1:], policy.temperature)[0]


@torch.no_grad()
def repeat_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between two passes over the same tokens, in fp32 with eager attention.

    In training mode some models are random, for instance in the choice of experts. That would be in the ratio of new to
    old log-probs, and no server does it.
    """
    sample = sample_tokens(policy)[0]
    with exact_fp32(policy), exact_attention(policy):
        return _largest(_logprobs(policy, [sample]) - _logprobs(policy, [sample]))


@torch.no_grad()
def tf32_difference(policy: PolicyModel) -> float:
    """Mean |log-prob difference| between TF32 and exact products, at positions beyond TF32's integers; 0 on a CPU.

    Finds models that compute positions with matrix products that `PolicyModel` does not protect.
    """
    sample = sample_tokens(policy)[0]
    first = max(0, min(_LARGE_POSITION, _longest(policy) or _LARGE_POSITION) - len(sample))
    with fp32_products("tf32"):
        rounded = _logprobs(policy, [sample], first)
    difference = float((rounded - _logprobs(policy, [sample], first)).abs().mean())
    return difference if difference == difference else float("inf")


def token_batch(samples: Sequence[Sequence[int]], device: torch.device, packed: bool = True) -> MicroBatch:
    """`samples` in one packed row, or in padded rows.

    Every token but the first of each sample is a target; advantages are 0.
    """
    rows = [samples] if packed else [[sample] for sample in samples]
    width = max(sum(map(len, row)) for row in rows)

    def column(values: Callable[[int, Sequence[int]], Iterable[int]], padding: int = 0) -> torch.Tensor:
        numbers, lines = count(), []
        for row in rows:
            line = [value for sample in row for value in values(next(numbers), sample)]
            lines.append([*line, *[padding] * (width - len(line))])
        return torch.tensor(lines, device=device)

    targets = column(lambda number, sample: (*sample[1:], IGNORED_LABEL), IGNORED_LABEL)
    segments = column(lambda number, sample: [number] * len(sample), PADDING_SEGMENT)
    zeros = torch.zeros(targets.shape, device=device)
    return MicroBatch(
        input_ids=column(lambda number, sample: sample),
        position_ids=column(lambda number, sample: range(len(sample))),
        attention_mask=None if packed else (segments != PADDING_SEGMENT).long(),
        segment_ids=segments,
        targets=targets,
        mask=targets != IGNORED_LABEL,
        trained=positions_of(targets != IGNORED_LABEL),
        old_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros,
        weights=zeros,
        versions=zeros.long(),
        oldest_versions=zeros.long(),
        num_segments=len(samples),
        step_tokens=sum(map(len, samples)) - len(samples),
        indices=tuple(range(len(samples))),
    )


def _logprobs(
    policy: PolicyModel, samples: Sequence[Sequence[int]], first_position: int = 0, *, packed: bool = True
) -> torch.Tensor:
    """One value per token of `samples` in order; the first of them begins at `first_position`."""
    batch = token_batch(samples, torch.device("cpu"), packed)
    batch = replace(batch, position_ids=batch.position_ids + first_position * (batch.segment_ids == 0))
    outputs: PolicyOutputs = policy(*policy.placed(batch, next(policy.parameters()).device))
    return outputs.logprobs[(batch.segment_ids != PADDING_SEGMENT).to(outputs.logprobs.device)]


def _longest(policy: PolicyModel) -> int | None:
    longest: int | None = getattr(policy.language_model.config.get_text_config(), "max_position_embeddings", None)
    return longest


def sample_tokens(policy: PolicyModel, lengths: Sequence[int] = _LENGTHS) -> list[list[int]]:
    """Distinct, repeatable samples of valid token ids, of these `lengths` or the model's maximum."""
    vocabulary = policy.language_model.config.get_text_config().vocab_size
    longest = _longest(policy) or max(lengths)
    return [
        [(37 * (start + 1) + 11 * k * k + 5 * k) % vocabulary for k in range(min(n, longest))]
        for start, n in enumerate(lengths)
    ]


def branching_tokens(policy: PolicyModel, lengths: Sequence[int] = _LENGTHS) -> list[list[int]]:
    """`sample_tokens`, between samples that begin as the first of them and go on as others or end."""
    first, *others = sample_tokens(policy, lengths)
    half, quarter = first[: len(first) // 2], first[: len(first) // 4]
    samples = [[*half, *others[0]], *others, first, quarter, [*half, *others[-1]], [*quarter, *others[0]]]
    return [sample[: len(first)] for sample in samples]


def _largest(difference: torch.Tensor) -> float:
    value = float(difference.abs().max())
    return value if value == value else float("inf")
