"""Compiles the decoder layers of a policy (`torch.compile`): a few kernels per layer instead of a hundred.

All layers share one graph for all micro-batches, and another one for those with shared prefixes. Both are verified
first: log-probs and gradients must be as near to those in fp32 as those of the uncompiled layers, which are kept
otherwise. Passes without gradients (probes, the reference model) are not compiled, as they would need more graphs
(`PolicyModel.products`). `TORCH_COMPILE_DISABLE=1` in the environment turns it off.
"""

from __future__ import annotations

import logging
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from pipelinerl.config import RunConfig
from pipelinerl.finetune.attention import VARLEN_ATTENTION
from pipelinerl.finetune.experts import own_experts_parameters
from pipelinerl.finetune.model_check import branching_tokens, exact_fp32, sample_tokens, token_batch
from pipelinerl.finetune.policy import PolicyModel, decoder_layers
from pipelinerl.finetune.sharded_model import wide_for_trial

logger = logging.getLogger(__name__)

#: Tokens of the first compiled passes, for which kernels are tuned, and of those that are compared, which in fp32 and
#: without a fused attention need more memory per token; shares of their samples. Branching ones are twice as many.
_TUNING_TOKENS, _COMPARED_TOKENS, _SHARES = 4096, 1024, (0.4, 0.25, 0.2, 0.15)
_OPTIONS = {
    # Otherwise micro-batches of other sizes would need graphs of their own: padding of matrices (models need none) and
    # reduction over rows and columns in one kernel would depend on the number of tokens.
    "shape_padding": False,
    "triton.mix_order_reduction_non_strict_mode": True,
    # Fewer kernels: 3 % faster in packs of 16,384 tokens, no difference in packs of 4,096.
    "combo_kernels": True,
}
#: Allowed errors: mean |log-prob difference| to fp32, and difference of gradients in relation to their norm; more if
#: those of the uncompiled layers times `_MARGIN` are larger. The error of bf16 depends on the model: 0.028 nats and
#: 0.058 for a trained 135M on a CPU, 0.025 and 0.014 when compiled.
_LOGPROB_TOLERANCE, _GRADIENT_TOLERANCE, _MARGIN = 0.03, 0.03, 1.2
_VALUES_OF_A_GRADIENT = 1024


def can_compile(policy: PolicyModel, config: RunConfig) -> bool:
    """Whether such layers are known to gain: dense, unsharded, with packed samples and one attention kernel on a
    GPU."""
    is_whole = config.backend.type == "plain" and config.finetune.seq_packing
    is_dense = next(own_experts_parameters(policy.language_model), None) is None
    is_possible = policy.attention == VARLEN_ATTENTION and not torch._dynamo.config.disable
    return is_possible and is_whole and is_dense and bool(decoder_layers(policy))


def compile_layers(policy: PolicyModel, pack_tokens: int, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the decoder layers of `policy` in place, unless the trial fails.

    Args:
        policy: on its device; its gradients are dropped.
        pack_tokens: of the largest micro-batch.
    """
    start = time.perf_counter()
    layers = decoder_layers(policy)
    tuned, compared = min(pack_tokens, _TUNING_TOKENS), min(pack_tokens // 2, _COMPARED_TOKENS)
    samples = branching_tokens(policy, _lengths(compared))
    # A layer is smaller than what DDP sends at once, so it need not be cut.
    torch._dynamo.config.optimize_ddp = False
    try:
        with exact_fp32(policy), wide_for_trial(policy), _checkpointed(policy):
            exact = _passes(policy, samples, may_share=False)
        without = _errors(_passes(policy, samples), exact)
        breaks = counters["graph_break"].total()
        for layer in layers:
            options = _OPTIONS if backend == "inductor" else None
            layer.compile(backend=backend, dynamic=True, options=options)
        _passes(policy, sample_tokens(policy, _lengths(tuned)))
        if policy.shares_prefixes:
            _passes(policy, branching_tokens(policy, _lengths(tuned // 2)))
        errors = _errors(_passes(policy, samples), exact)
        fault = _fault(errors, without)
        if policy.shares_prefixes:
            # The other graph.
            fault = fault or _fault(_errors(_passes(policy, samples, may_share=False), exact), without)
        if counters["graph_break"].total() > breaks:
            fault = "they are not one graph"
    # Raised for code that torch cannot compile, a missing or broken C compiler, layers that cannot be checkpointed.
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        ImportError,
        OSError,
        subprocess.SubprocessError,
    ) as error:
        fault = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    policy.zero_grad(set_to_none=True)
    if next(policy.parameters()).is_cuda:  # servers may need the memory, and it is no step's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    policy.has_compiled_layers = fault is None
    if fault is None:
        logger.info("decoder layers compiled in %.0f s: %s", time.perf_counter() - start, _told(errors, without))
        return
    for layer in layers:
        layer._compiled_call_impl = None
    logger.warning("decoder layers are not compiled, so steps take longer: %s", fault)


def _lengths(tokens: int) -> list[int]:
    return [int(share * tokens) for share in _SHARES]


@contextmanager
def _checkpointed(policy: PolicyModel) -> Iterator[None]:
    """Within it only one layer at a time has activations: wide ones of all layers might not fit."""
    model = policy.language_model
    if model.is_gradient_checkpointing or not model.supports_gradient_checkpointing:
        yield
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


@dataclass(frozen=True)
class _Passes:
    """Log-probs of some samples in one row, and some values of the gradient of their sum from each parameter."""

    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Errors:
    """Mean |log-prob difference| to fp32 in nats, difference of gradients in relation to their norm, and the parameter
    with the largest part in that."""

    logprobs: float
    gradients: float
    worst: str


def _passes(policy: PolicyModel, samples: Sequence[Sequence[int]], may_share: bool = True) -> _Passes:
    batch = token_batch(samples, torch.device("cpu"))
    logprobs = policy(*policy.placed(batch, next(policy.parameters()).device, may_share)).logprobs
    with policy.products():
        logprobs.sum().backward()
    gradients = {name: p.grad.flatten() for name, p in policy.named_parameters() if p.grad is not None}
    some = {name: grad[:: max(1, len(grad) // _VALUES_OF_A_GRADIENT)].float() for name, grad in gradients.items()}
    policy.zero_grad(set_to_none=True)
    return _Passes(logprobs.detach(), some)


def _errors(found: _Passes, exact: _Passes) -> _Errors:
    parts = {
        name: float((found.gradients[name] - grad).norm()) if name in found.gradients else math.inf
        for name, grad in exact.gradients.items()
    }
    norm = float(torch.cat([*exact.gradients.values()]).norm())
    logprobs = float((found.logprobs - exact.logprobs).abs().mean())
    relative = math.hypot(*parts.values()) / norm if norm else math.nan
    return _Errors(logprobs, relative, max(parts, key=lambda name: parts[name]))


def _fault(errors: _Errors, without: _Errors) -> str | None:
    # NaN must be a fault.
    if errors.logprobs <= max(_LOGPROB_TOLERANCE, _MARGIN * without.logprobs) and errors.gradients <= max(
        _GRADIENT_TOLERANCE, _MARGIN * without.gradients
    ):
        return None
    return f"{_told(errors, without)}; the largest part is in {errors.worst}"


def _told(errors: _Errors, without: _Errors) -> str:
    return (
        f"log-probs are {errors.logprobs:.2g} nats from fp32 (uncompiled {without.logprobs:.2g}), gradients "
        f"{errors.gradients:.2g} of their norm ({without.gradients:.2g})"
    )
