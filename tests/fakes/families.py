"""Tiny random models of many families, none of whose weights is a value of bf16."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.packing_check import token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.weights.source import saved_buffers

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 41, 12]
SHAPE: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)
#: What is special about each: where a weight is used that is no matrix of a linear layer.
FAMILIES: dict[str, dict[str, Any]] = {
    # Norms of queries and keys; norms of 1 + weight.
    "qwen3": dict(head_dim=8),
    "gemma3_text": dict(head_dim=8),
    # A bias of the head, which is added in fp32; matrices that are stored transposed.
    "phi": {},
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    # Experts in one tensor; with biases of two dimensions and sinks; beside shared ones.
    "qwen3_moe": dict(**EXPERTS, head_dim=8),
    "mixtral": dict(num_local_experts=4),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, layer_types=["full_attention"] * 2),
    "glm4_moe": dict(**EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=8),
    # Whose checkpoints have one tensor per expert, or other names than the model in memory; with a bias of the router.
    "olmoe": dict(EXPERTS, intermediate_size=32),
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=32),
    "deepseek_v3": dict(
        **EXPERTS,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, rotary_dim=4),
    "gpt_neox": dict(rotary_pct=0.5),
    "qwen3_next": dict(
        **EXPERTS,
        shared_expert_intermediate_size=32,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    # Decays and steps in fp32, of one dimension and of two; convolutions.
    "falcon_mamba": dict(state_size=4),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=8, n_groups=2),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    # Vectors of three dimensions.
    "rwkv": {},
}


@torch.no_grad()
def logprobs(policy: PolicyModel) -> torch.Tensor:
    batch = token_batch([IDS], torch.device("cpu"))
    return policy(batch, policy.layout_of(batch), 1.0).logprobs


def random_model(family: str, **changes: Any) -> Any:
    """A model none of whose weights is a value of bf16."""
    return model_of(AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes}))


def model_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for tensor in (*model.parameters(), *(buffer for _, buffer in saved_buffers(model))):
            tensor.add_(0.05 * torch.randn_like(tensor))
    return model
