"""Makes experts of a mixture follow autocast, as linear layers do.

Autocast does not cover PyTorch's grouped products: with fp32 parameters they multiply in fp32, for which GPUs have no
grouped kernel, while servers multiply in 16 bits. Registered with transformers in place of its grouped implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

OWN_EXPERTS = "pipelinerl_grouped_mm"
_GROUPED = "grouped_mm"


def use_own_experts(model: PreTrainedModel) -> None:
    """Let the experts of `model` follow autocast where transformers would use its grouped products."""
    ALL_EXPERTS_FUNCTIONS.register(OWN_EXPERTS, _experts_forward)
    if model.config._experts_implementation == _GROUPED:
        model.set_experts_implementation(OWN_EXPERTS)


def own_experts_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Parameters of experts that follow autocast: like those of linear layers, their products round them."""
    for module in model.modules():
        # Transformers' decorator sets this attribute; other layers are never dispatched.
        config = getattr(module, "config", None) if hasattr(module, "_is_expert_parallel") else None
        if config is not None and config._experts_implementation == OWN_EXPERTS:
            yield from module.parameters(recurse=False)


class _Narrow:
    """A layer of experts whose parameters are read in `dtype`; gradients have the parameters' own."""

    def __init__(self, experts: torch.nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        is_wide = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_wide else value


def _experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Mixed outputs `[tokens, hidden]` in the dtype of `hidden_states`.

    Args:
        hidden_states: `[tokens, hidden]`.
        top_k_index: experts of every token, `[tokens, k]`.
        top_k_weights: their weights, `[tokens, k]`.
    """
    device_type = hidden_states.device.type
    if not torch.is_autocast_enabled(device_type):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    dtype = torch.get_autocast_dtype(device_type)
    narrow: Any = _Narrow(self, dtype)
    return grouped_mm_experts_forward(narrow, hidden_states.to(dtype), top_k_index, top_k_weights).to(
        hidden_states.dtype
    )
