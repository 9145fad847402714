"""Log-prob and entropy of tokens from hidden states, a chunk of rows at a time: full logits never exist.

`token_logprobs` keeps two numbers per token for backward (log-normalizer and entropy) and computes the chunk's logits
again there, so peak memory is one chunk of `chunk_tokens x vocabulary` floats instead of several copies of
`tokens x vocabulary`.

With z = logits / temperature, p = softmax(z), L = logsumexp(z) and H = L - sum(p * z):
    log-prob of target y: z_y - L        d/dz = onehot(y) - p
    entropy:              H              d/dz = -p * (z - L + H)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pipelinerl.records import IGNORED_LABEL
from pipelinerl.rl.precision import fp32_products


def token_logprobs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    head_bias: torch.Tensor | None = None,
    fp32_head: bool = True,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `targets` under `softmax(hidden @ head_weight.T / temperature)`.

    Args:
        hidden: [..., D] final hidden states (after the last norm), any float dtype.
        head_weight: [V, D] output head.
        targets: [...] int64; -100 is skipped: its log-prob and entropy are 0 and it gives no gradient.
        temperature: sampling temperature, > 0.
        chunk_tokens: rows whose logits exist at once.
        with_entropy: also return the entropy (nats) of the whole distribution at every trained position.
        head_bias: [V] or None.
        fp32_head: logits are products of the inputs' values accumulated and kept in fp32, without TF32 also where it
            is allowed. False: the product is rounded to the inputs' dtype first, as a model with a bf16 head does (fp32
            inputs are multiplied in TF32 where it is allowed). Softmax is in fp32 (or fp64) always.
        rows: [N] int64, flat positions of the targets that are not -100. None: they are looked for, which makes the
            host wait for a GPU.

    Returns:
        (log-probs, entropy or None), float32 (float64 for float64 inputs), shape of `targets`.
    """
    if temperature <= 0:
        raise ValueError(f"temperature: got {temperature}, expected > 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: got {chunk_tokens}, expected at least 1")
    if rows is None:
        rows = (targets.reshape(-1) != IGNORED_LABEL).nonzero(as_tuple=True)[0]
    # Prompts and padding never reach the head: only trained rows are selected.
    picked = hidden.reshape(-1, hidden.shape[-1])[rows]
    logprobs, entropy = _FusedHead.apply(  # type: ignore[no-untyped-call]
        picked, head_weight, head_bias, targets.reshape(-1)[rows], temperature, chunk_tokens, with_entropy, fp32_head
    )
    return _spread(logprobs, rows, targets), _spread(entropy, rows, targets) if with_entropy else None


def logprobs_from_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropy) from full logits [..., V]; for models whose head is not one linear map."""
    log_p = torch.log_softmax(logits.to(_wide(logits.dtype)) / temperature, dim=-1)
    trained = targets != IGNORED_LABEL
    picked = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    logprobs = torch.where(trained, picked, 0.0)
    if not with_entropy:
        return logprobs, None
    return logprobs, torch.where(trained, -(log_p.exp() * log_p).sum(-1), 0.0)


def _products(fp32_head: bool) -> AbstractContextManager[None]:
    """An fp32 head is exact; another one is as exact as the rest of the model."""
    return fp32_products("ieee") if fp32_head else nullcontext()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spread(values: torch.Tensor, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = values.new_zeros(like.numel())
    return out.index_copy(0, rows, values).reshape(like.shape)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Product accumulated and returned in fp32 (fp64). On CUDA, half-precision operands stay as they are: tensor cores
    multiply them exactly and add in fp32, so no fp32 copy of the head is made."""
    wide = _wide(left.dtype)
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16) and right.dtype == left.dtype:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


class _FusedHead(torch.autograd.Function):
    """Linear head -> (log-prob, entropy) over chunks of rows, with logits computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        fp32_head: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, wide = hidden.shape[0], _wide(hidden.dtype)
        logprobs = torch.zeros(count, dtype=wide, device=hidden.device)
        log_norm, entropy = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            with _products(fp32_head):
                scores = _scores(hidden[part], weight, bias, temperature, fp32_head)
            log_norm[part] = torch.logsumexp(scores, dim=-1)
            logprobs[part] = scores.gather(-1, targets[part, None]).squeeze(-1) - log_norm[part]
            if with_entropy:
                scores.sub_(log_norm[part, None])
                entropy[part] = -(scores.exp() * scores).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_norm, entropy)
        ctx.settings = (temperature, chunk_tokens, with_entropy, fp32_head)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_norm, entropy = ctx.saved_tensors
        temperature, chunk_tokens, with_entropy, fp32_head = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        wide = _wide(hidden.dtype)
        # d z / d logits: on vectors here, instead of one more pass over every chunk.
        grad_logprobs, grad_entropy = grad_logprobs / temperature, grad_entropy / temperature
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if need_bias else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            with _products(fp32_head):
                scores = _scores(hidden[part], weight, bias, temperature, fp32_head).sub_(log_norm[part, None])
                slope = _slope(
                    scores, targets[part], grad_logprobs[part], grad_entropy[part], entropy[part], with_entropy
                )
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
                slope = slope.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = _matmul(slope, weight).to(hidden.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight, slope, hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _scores(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float, fp32_head: bool
) -> torch.Tensor:
    """Logits of one chunk over the temperature, in fp32 (fp64)."""
    logits = _matmul(hidden, weight.T) if fp32_head else (hidden @ weight.T).to(_wide(hidden.dtype))
    if bias is not None:
        logits += bias
    return logits if temperature == 1.0 else logits.div_(temperature)


def _slope(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
    entropy: torch.Tensor,
    with_entropy: bool,
) -> torch.Tensor:
    """Gradient with respect to z (formulas in the module docstring), scaled like its inputs. Overwrites `log_p`."""
    if with_entropy:
        p = log_p.exp()
        slope = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(p)
    else:
        slope = log_p.exp_().mul_(-grad_logprobs[:, None])
    slope.scatter_add_(-1, targets[:, None], grad_logprobs[:, None].to(slope.dtype))
    return slope


def _add_product(total: torch.Tensor, slope: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += slope.T @ hidden, added in fp32 (fp64)."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += _matmul(slope.T, hidden)
