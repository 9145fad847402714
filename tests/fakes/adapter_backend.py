"""A trainer's backend with an adapter on the random model, for tests of updates that send the adapter alone."""

from __future__ import annotations

from typing import Any

import torch
from fakes.random_model import random_model

from pipelinerl.config.finetune import FinetuneConfig, LoraConfig
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, register_own_attention
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks


def adapter_backend(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    head_size: int = 32,
    tied: bool = True,
    **lora: Any,
) -> PlainBackend:
    """Products in `dtype`, as in the servers. The base model is what `save_random_model` saves."""
    register_own_attention()
    model = random_model(tied=tied, head_size=head_size)
    model.set_attn_implementation(SEGMENTED_ATTENTION)
    policy = PolicyModel(model.train(), chunk_tokens=16, compute_dtype=dtype, served_dtype=dtype).to(device)
    add_adapters(policy, LoraConfig(enabled=True, sync="adapter", **{"r": 4, "alpha": 16, **lora}), "base")
    return PlainBackend(policy.to(device), FinetuneConfig(), Ranks(device=torch.device(device)))


@torch.no_grad()
def draw_adapter(backend: PlainBackend, seed: int) -> None:
    """Large random A and B."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backend.policy.parameters():
        if parameter.requires_grad:
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
