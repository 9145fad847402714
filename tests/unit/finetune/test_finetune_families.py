"""Which attention a family may be trained with: leaks and soft-capping are found whatever the precision."""

import pytest
import torch
from fakes.varlen_kernel import plain_varlen_attn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pipelinerl.finetune import attention
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, VARLEN_ATTENTION, register_own_attention
from pipelinerl.finetune.model import find_fault, remove_dropout
from pipelinerl.finetune.policy import PolicyModel

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
#: Attention and dtype of the products, as on a GPU and on a CPU.
WAYS = [(VARLEN_ATTENTION, torch.bfloat16), (SEGMENTED_ATTENTION, torch.float32), ("sdpa", torch.float32)]


@pytest.fixture(autouse=True)
def plain_kernel(monkeypatch):
    register_own_attention()
    monkeypatch.setattr(attention, "_kernel", lambda: plain_varlen_attn)


def policy_of(model, scale, attention, dtype):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.set_attn_implementation(attention)
    remove_dropout(model)
    return PolicyModel(model, compute_dtype=dtype)


@pytest.mark.parametrize(("attention", "dtype"), WAYS)
def test_a_convolution_that_crosses_samples_is_found_in_every_precision(attention, dtype):
    """X2. Its leak of 0.02 nats is less than what rounding to bf16 may do."""
    torch.manual_seed(1)
    model = Lfm2ForCausalLM(Lfm2Config(**SHAPE, conv_L_cache=3, layer_types=["conv", "full_attention"]))
    policy = policy_of(model, 3, attention, dtype)
    assert "packed samples see each other" in find_fault(policy, packed=True)
    assert find_fault(policy, packed=False) is None
    assert (policy.attention, policy.compute_dtype) == (attention, dtype)


@pytest.mark.parametrize(("attention", "dtype"), [*WAYS, ("eager", torch.float32)])
def test_soft_capped_attention_is_trained_only_where_it_is_capped(attention, dtype):
    torch.manual_seed(1)
    config = Gemma2Config(
        **SHAPE, head_dim=8, attn_logit_softcapping=5.0, final_logit_softcapping=None, sliding_window=4
    )
    fault = find_fault(policy_of(Gemma2ForCausalLM(config), 20, attention, dtype), packed=True)
    assert (fault is None) == (attention == "eager"), fault


@pytest.mark.parametrize(("attention", "dtype"), [*WAYS, ("eager", torch.float32)])
def test_a_plain_family_is_trained_with_any(attention, dtype):
    torch.manual_seed(1)
    policy = policy_of(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), 1, attention, dtype)
    assert find_fault(policy, packed=True) is None
    assert policy.attention == attention


def test_noise_on_what_routers_see_is_off():
    """In training mode only: the same weights would have other log-probs at every pass, and than in the servers."""
    torch.manual_seed(1)
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.01)
    model = MixtralForCausalLM(config).train()
    policy = policy_of(model, 10, "sdpa", torch.float32)
    model.model.layers[0].mlp.jitter_noise = 0.01
    assert "two passes over the same tokens differ" in find_fault(policy, packed=False)
    remove_dropout(model)
    assert find_fault(policy, packed=True) is None


def test_a_family_that_routes_at_random_is_refused():
    """Whatever its settings: which expert a token goes to is drawn. 9 tokens alone seldom show it."""
    torch.manual_seed(1)
    config = PhimoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128)
    policy = policy_of(PhimoeForCausalLM(config).train(), 10, "sdpa", torch.float32)
    assert "two passes over the same tokens differ" in find_fault(policy, packed=True)
