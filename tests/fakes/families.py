"""Tiny random models of the families in docs/families.md, in shapes that vLLM's kernels for CPUs have."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.weights.buffers import saved_buffers

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 41, 12]
SHAPE: dict[str, Any] = dict(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)
DELTA_NET: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    layer_types=["linear_attention", "full_attention"],
)
MLA: dict[str, Any] = dict(
    q_lora_rank=16,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    num_key_value_heads=2,
)
MAMBA: dict[str, Any] = dict(
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_d_state=16,
    mamba_n_groups=1,
    mamba_expand=2,
    mamba_d_conv=4,
    mamba_chunk_size=32,
)
WINDOW: dict[str, Any] = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
LONGROPE: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=100.0,
    short_factor=[1.0 + 0.1 * k for k in range(16)],
    long_factor=[2.0 + 0.5 * k for k in range(16)],
)
DYNAMIC: dict[str, Any] = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": dict(sliding_window=16, query_pre_attn_scalar=32),
    "gemma3_text": dict(sliding_window=16, query_pre_attn_scalar=32),
    "gemma4_text": dict(
        **WINDOW,
        global_head_dim=32,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
    "phi": {},
    "phi3": {},
    "phi3 (longrope)": dict(original_max_position_embeddings=32, rope_parameters=LONGROPE),
    "llama (dynamic)": dict(rope_parameters=DYNAMIC),
    "olmo": {},
    "olmo2": {},
    "olmo3": dict(**WINDOW),
    "granite": dict(logits_scaling=2.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1),
    "cohere": {},
    "cohere2": dict(**WINDOW),
    "glm": dict(partial_rotary_factor=0.5),
    "glm4": dict(partial_rotary_factor=0.5),
    "starcoder2": dict(residual_dropout=0.1, embedding_dropout=0.1),
    "stablelm": {},
    "gpt2": dict(n_embd=64, n_layer=2, n_head=2),
    # It has no key and value heads of its own, but vLLM would believe their number; `persimmon` alike.
    "gpt_neox": dict(rotary_pct=0.5, num_key_value_heads=2),
    "gpt_bigcode": dict(n_embd=64, n_layer=2, n_head=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=64, dropout=0.1),
    "seed_oss": dict(residual_dropout=0.1),
    "exaone4": dict(**WINDOW),
    "smollm3": {},
    "apertus": {},
    "nemotron": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "arcee": {},
    "helium": {},
    "persimmon": dict(num_key_value_heads=2),
    "ministral3": {},
    "qwen3_moe": dict(**EXPERTS),
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=32),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(**EXPERTS),
    "deepseek_v2": dict(**EXPERTS, **MLA, n_group=1, topk_group=1, first_k_dense_replace=1),
    "deepseek_v3": dict(
        head_dim=64,
        **EXPERTS,
        **MLA,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
    ),
    "glm4_moe": dict(**EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1),
    "glm4_moe_lite": dict(
        head_dim=64,
        **EXPERTS,
        **MLA,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    "dots1": dict(**EXPERTS, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0),
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "granitemoeshared": dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32),
    "minimax_m2": dict(
        scoring_func="sigmoid", use_routing_bias=True, num_local_experts=4, num_experts_per_tok=2, rotary_dim=16
    ),
    "gpt_oss": dict(**WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_next": dict(**EXPERTS, **DELTA_NET, shared_expert_intermediate_size=32),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "lfm2_moe": dict(**EXPERTS, conv_dim=64, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    "flex_olmo": dict(EXPERTS, moe_intermediate_size=64),
    "afmoe": dict(
        **EXPERTS, **WINDOW, num_dense_layers=1, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1
    ),
    "exaone_moe": dict(**EXPERTS, **WINDOW, first_k_dense_replace=1),
    "jamba": dict(
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "llama4_text": dict(
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=64,
        interleave_moe_layer_step=2,
        attention_chunk_size=32,
    ),
    "qwen3_5_moe_text": dict(**EXPERTS, **DELTA_NET, shared_expert_intermediate_size=32),
    "solar_open": dict(**EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1),
    "qwen3_5_text": dict(**DELTA_NET),
    # What vLLM reads as well, as published checkpoints have it.
    "lfm2": dict(
        conv_dim=64,
        layer_types=["conv", "full_attention"],
        block_dim=64,
        block_ff_dim=64,
        block_auto_adjust_ff_dim=False,
    ),
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "mamba2": dict(intermediate_size=128, num_heads=4, head_dim=32, state_size=16, n_groups=1, chunk_size=32),
    "granitemoehybrid": dict(
        **MAMBA,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"],
    ),
    "bamba": dict(**MAMBA, attn_layer_indices=[1], attn_rotary_emb=16),
    "falcon_h1": dict(
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
        lm_head_multiplier=0.3,
    ),
    "nemotron_h": dict(
        hybrid_override_pattern="M*",
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=32,
        layers_block_type=["mamba", "attention"],
    ),
    "olmo_hybrid": dict(**DELTA_NET),
}
#: One of each kind: norms of queries and keys, and of 1 + weight; a bias of the head, which is added in fp32; matrices
#: stored transposed; experts in one tensor, with biases and sinks, beside shared ones, one tensor each in checkpoints,
#: by other names; biases of routers; decays and steps in fp32; convolutions.
KINDS = (
    *("qwen3", "gemma3_text", "phi", "gpt2", "gpt_neox", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "olmoe"),
    *("qwen2_moe", "deepseek_v3", "granitemoe", "minimax_m2", "qwen3_next", "falcon_mamba", "mamba2", "lfm2"),
    # With vectors of three dimensions; vLLM does not have it.
    "rwkv",
)


@torch.no_grad()
def logprobs(policy: PolicyModel) -> torch.Tensor:
    batch = token_batch([IDS], torch.device("cpu"))
    return policy(batch, policy.layout_of(batch), 1.0).logprobs


def random_model(family: str, **changes: Any) -> Any:
    """A model none of whose weights is a value of bf16."""
    return model_of(AutoConfig.for_model(family.partition(" ")[0], **{**SHAPE, **FAMILIES.get(family, {}), **changes}))


def model_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for tensor in (*model.parameters(), *(buffer for _, buffer in saved_buffers(model))):
            tensor.add_(0.05 * torch.randn_like(tensor))
    return model
