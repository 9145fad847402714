"""Tries a freshly loaded model on a few tokens: does it compute what its own head says, and does packing leak?

Called by `load_policy` before training; costs a few forward passes over 20 to 64 tokens. What a model should compute is
asked of its eager attention, which honours everything that a family has (soft-capping, sinks, windows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from pipelinerl.finetune.policy import PolicyModel, PolicyOutputs
from pipelinerl.records import IGNORED_LABEL
from pipelinerl.rl.logprobs import logprobs_from_logits
from pipelinerl.rl.microbatch import MicroBatch, positions_of
from pipelinerl.rl.precision import fp32_products

_LENGTHS = (5, 9, 3)
#: Odd numbers above 2048 are no TF32 values.
_LARGE_POSITION = 4096
#: Enough for something that is drawn at random for each of them to show.
_REPEATED_TOKENS = 64
_EAGER = "eager"


@contextmanager
def exact_attention(policy: PolicyModel) -> Iterator[None]:
    """Within it the model attends in its plainest way, which exists in fp32; models without one stay as they are."""
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


@torch.no_grad()
def family_leak(policy: PolicyModel) -> float:
    """`packing_difference` in fp32 with eager attention: state that crosses borders whatever the attention is.

    A kernel for half precision cannot be asked: rounding would hide the leak of a convolution or a recurrent state.
    """
    dtype = policy.compute_dtype
    policy.compute_dtype = torch.float32
    try:
        with exact_attention(policy):
            return packing_difference(policy)
    finally:
        policy.compute_dtype = dtype


@torch.no_grad()
def packing_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between samples in one packed row and the same samples alone.

    The samples before one another are different tokens, so attention or state that crosses a border shows.
    """
    samples = _samples(policy)
    packed = _logprobs(policy, samples)
    alone = torch.cat([_logprobs(policy, [sample]) for sample in samples])
    return _largest(packed - alone)


@torch.no_grad()
def forward_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between the policy's path (own head) and the model's plain logits."""
    sample = _samples(policy)[1]
    ids = torch.tensor([sample], device=next(policy.parameters()).device)
    in_bf16 = torch.autocast(ids.device.type, torch.bfloat16, enabled=policy.compute_dtype == torch.bfloat16)
    with exact_attention(policy), in_bf16:
        logits = policy.language_model(input_ids=ids, use_cache=False).logits
    expected, _ = logprobs_from_logits(logits[0, :-1], ids[0, 1:], policy.temperature)
    return _largest(_logprobs(policy, [sample])[: len(sample) - 1] - expected)


@torch.no_grad()
def repeat_difference(policy: PolicyModel) -> float:
    """Largest |log-prob difference| between two passes over the same tokens, in fp32 with eager attention.

    In training mode some families draw at random inside the model, for instance which expert a token goes to: the ratio
    of new to old log-probs would be about that, and no server does it.
    """
    vocabulary = policy.language_model.config.get_text_config().vocab_size
    sample = [(11 * k * k + 5 * k) % vocabulary for k in range(_REPEATED_TOKENS)]
    dtype = policy.compute_dtype
    policy.compute_dtype = torch.float32
    try:
        with exact_attention(policy):
            return _largest(_logprobs(policy, [sample]) - _logprobs(policy, [sample]))
    finally:
        policy.compute_dtype = dtype


@torch.no_grad()
def tf32_difference(policy: PolicyModel) -> float:
    """Mean |log-prob difference| between products in TF32 and exact ones, at positions that TF32 cannot hold.

    It finds models that compute positions with matrix products which `PolicyModel` does not know of. 0 on a CPU.
    """
    sample = _samples(policy)[1]
    config = policy.language_model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _LARGE_POSITION
    first = max(0, min(_LARGE_POSITION, longest) - len(sample))
    with fp32_products("tf32"):
        rounded = _logprobs(policy, [sample], first)
    difference = float((rounded - _logprobs(policy, [sample], first)).abs().mean())
    return difference if difference == difference else float("inf")


def token_batch(samples: Sequence[Sequence[int]], device: torch.device) -> MicroBatch:
    """One packed row of `samples` in which every token but the first of each is a target; advantages are 0."""
    flat = [token for sample in samples for token in sample]
    targets = [target for sample in samples for target in (*sample[1:], IGNORED_LABEL)]
    positions = [position for sample in samples for position in range(len(sample))]
    segments = [number for number, sample in enumerate(samples) for _ in sample]
    zeros = torch.zeros(1, len(flat), device=device)
    target_row = torch.tensor([targets], device=device)
    return MicroBatch(
        input_ids=torch.tensor([flat], device=device),
        position_ids=torch.tensor([positions], device=device),
        attention_mask=None,
        segment_ids=torch.tensor([segments], device=device),
        targets=target_row,
        mask=target_row != IGNORED_LABEL,
        trained=positions_of(target_row != IGNORED_LABEL),
        old_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros,
        weights=zeros,
        versions=zeros.long(),
        oldest_versions=zeros.long(),
        num_segments=len(samples),
        step_tokens=len(flat) - len(samples),
        indices=tuple(range(len(samples))),
    )


def _logprobs(policy: PolicyModel, samples: Sequence[Sequence[int]], first_position: int = 0) -> torch.Tensor:
    batch = token_batch(samples, torch.device("cpu"))
    batch = replace(batch, position_ids=batch.position_ids + first_position)
    outputs: PolicyOutputs = policy(*policy.placed(batch, next(policy.parameters()).device))
    return outputs.logprobs[0]


def _samples(policy: PolicyModel) -> list[list[int]]:
    """Three different, repeatable samples of valid token ids."""
    vocabulary = policy.language_model.config.get_text_config().vocab_size
    return [[(37 * (start + 1) + 11 * k * k) % vocabulary for k in range(n)] for start, n in enumerate(_LENGTHS)]


def _largest(difference: torch.Tensor) -> float:
    value = float(difference.abs().max())
    return value if value == value else float("inf")
