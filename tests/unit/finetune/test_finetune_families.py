"""Which attention a family may be trained with: leaks and soft-capping are found whatever the precision; a sample has
the frequencies of the servers whatever its row holds."""

import math
from contextlib import nullcontext

import pytest
import torch
from fakes.two_ranks import on_two_ranks
from fakes.varlen_kernel import plain_varlen_attn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune import attention
from pipelinerl.finetune import model as loading
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, VARLEN_ATTENTION, register_own_attention
from pipelinerl.finetune.model import (
    find_fault,
    fix_frequencies,
    load_policy,
    refuse_positions_beyond_dynamic,
    remove_dropout,
)
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.policy import PolicyModel

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CPU = torch.device("cpu")
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


@pytest.mark.parametrize("scale", [8, 20])
@pytest.mark.parametrize(("attention", "dtype"), [*WAYS, ("eager", torch.float32)])
def test_soft_capped_attention_is_trained_only_where_it_is_capped(attention, dtype, scale):
    """Also where the attention is still so weak that the cap hardly shows."""
    torch.manual_seed(1)
    config = Gemma2Config(
        **SHAPE, head_dim=8, attn_logit_softcapping=50.0, final_logit_softcapping=None, sliding_window=4
    )
    policy = policy_of(Gemma2ForCausalLM(config), scale, attention, dtype)
    fault = find_fault(policy, packed=True)
    assert {layer.self_attn.attn_logit_softcapping for layer in policy.language_model.model.layers} == {50.0}
    assert (fault is None) == (attention == "eager"), fault


@pytest.mark.parametrize(("attention", "dtype"), [*WAYS, ("eager", torch.float32)])
def test_a_plain_family_is_trained_with_any(attention, dtype):
    torch.manual_seed(1)
    policy = policy_of(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), 1, attention, dtype)
    assert find_fault(policy, packed=True) is None
    assert policy.attention == attention


@pytest.mark.parametrize(("scale", "difference", "is_fine"), [(1, 0.3, False), (20, 0.3, True), (20, 0.6, False)])
def test_a_model_may_differ_in_bf16_as_far_as_rounding_goes(monkeypatch, scale, difference, is_fine):
    """Of large weights rounding alone makes 0.23 nats, of small ones 0.001."""
    torch.manual_seed(1)
    policy = policy_of(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), scale, VARLEN_ATTENTION, torch.bfloat16)
    monkeypatch.setattr(loading, "forward_difference", lambda _: difference)
    assert (find_fault(policy, packed=True) is None) == is_fine


@pytest.mark.parametrize(
    ("faults", "verdict"),
    [
        ((None, None), None),
        ((None, "no room for 2 €"), "rank 1: no room for 2 €"),
        (("differ by 0.2", None), "rank 0: differ by 0.2"),
        (("differ by 0.2", "differ by 0.3"), "differ by 0.2"),
        ((None, 249 * "€"), "rank 1: " + 166 * "€"),
    ],
)
def test_ranks_agree_on_the_first_fault(faults, verdict):
    assert on_two_ranks(lambda ranks: ranks.first_fault(faults[ranks.rank])) == [verdict, verdict]


def test_ranks_take_an_attention_together_or_not_at_all():
    """A kernel fails on one rank; on the other it would do."""
    torch.manual_seed(1)
    policies = [policy_of(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), 1, "sdpa", torch.float32) for _ in range(2)]

    def verdict(ranks):
        return find_fault(policies[ranks.rank], packed=True, ranks=ranks)

    assert on_two_ranks(verdict) == [None, None]
    policies[1].has_linear_head = False
    assert on_two_ranks(verdict) == [None, None]
    assert not policies[0].has_linear_head, "the same path on both"

    def fail(*_):
        raise RuntimeError("no kernel image")

    policies[1].language_model.model.layers[1].register_forward_pre_hook(fail)
    assert on_two_ranks(verdict) == 2 * ["rank 1: RuntimeError: no kernel image"]


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


def random_family(family, **changes):
    config = AutoConfig.for_model(family, **{**SHAPE, "bos_token_id": None, "pad_token_id": 0, **changes})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


ORIGINAL = 16
SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [4.0, 8.0, 16.0, 32.0]
ROPES = {
    "longrope": dict(family="phi3", max_position_embeddings=64, original_max_position_embeddings=ORIGINAL)
    | dict(rope_parameters=dict(rope_type="longrope", rope_theta=100.0, short_factor=SHORT, long_factor=LONG)),
    "dynamic": dict(family="llama", max_position_embeddings=ORIGINAL)
    | dict(rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)),
}
LENGTHS = (5, 3 * ORIGINAL, ORIGINAL, ORIGINAL + 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("attention", [SEGMENTED_ATTENTION, "sdpa", "eager"])
@pytest.mark.parametrize("served_length", [ORIGINAL, 64])
@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_a_sample_beside_a_long_one_has_the_logprobs_that_it_has_alone(rope, served_length, attention, packed):
    """X2, on lengths that cross the original one, in both orders and after a row that was long."""
    model = random_family(**ROPES[rope])
    fix_frequencies(model, served_length)
    policy = policy_of(model, 1, attention, torch.float32)
    samples = [[(7 * n + 11 * k * k) % 64 for k in range(n)] for n in LENGTHS]
    alone = [policy(*policy.placed(token_batch([sample], CPU), CPU)).logprobs[0] for sample in samples]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        batch = token_batch([samples[k] for k in order], CPU, packed)
        together = policy(*policy.placed(batch, CPU)).logprobs[batch.segment_ids >= 0]
        torch.testing.assert_close(together, torch.cat([alone[k] for k in order]), atol=1e-5, rtol=0)
    assert find_fault(policy, packed=packed, rows=3) is None


@pytest.mark.parametrize(
    ("rope", "served_length", "factors", "scale"),
    [
        ("longrope", ORIGINAL, SHORT, math.sqrt(1.5)),  # 1 + ln(64 / 16) / ln(16)
        ("longrope", None, SHORT, math.sqrt(1.5)),
        ("longrope", ORIGINAL + 1, LONG, math.sqrt(1.5)),
        ("dynamic", 64, [1.0] * 4, 1.0),
    ],
)
def test_frequencies_are_those_of_the_servers_by_hand(rope, served_length, factors, scale):
    """vLLM: by `max_model_len` for `longrope`; those of `max_position_embeddings` for `dynamic`."""
    model = random_family(**ROPES[rope])
    fix_frequencies(model, served_length)
    angles = torch.tensor([3.0 / (factor * 100.0 ** (2 * k / 8)) for k, factor in enumerate(factors)])
    for longest in (60, 3):  # the second call must not see what the first one left
        positions = torch.tensor([[3, longest]])
        cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
        torch.testing.assert_close(cos[0, 0, :4], angles.cos() * scale)
        torch.testing.assert_close(sin[0, 0, :4], angles.sin() * scale)


@pytest.mark.parametrize(
    ("rope", "served_length", "is_refused"),
    [("dynamic", ORIGINAL, False), ("dynamic", ORIGINAL + 1, True), ("dynamic", None, True), ("longrope", 64, False)],
)
def test_servers_get_no_positions_for_which_vllm_has_no_frequencies(rope, served_length, is_refused):
    config = random_family(**ROPES[rope]).config
    with pytest.raises(ConfigError) if is_refused else nullcontext() as found:
        refuse_positions_beyond_dynamic(config, served_length)
    if is_refused:
        assert (found.value.key, str(ORIGINAL) in str(found.value)) == ("vllm_config.vllm_kwargs.max_model_len", True)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("seed_oss", dict(residual_dropout=0.5, head_dim=8)),
        ("starcoder2", dict(residual_dropout=0.5, embedding_dropout=0.5)),
        ("opt", dict(dropout=0.5, layerdrop=0.5, ffn_dim=64, word_embed_proj_dim=32)),
    ],
)
def test_dropout_is_off_whatever_its_name(family, changes):
    policy = policy_of(random_family(family, **changes), 1, SEGMENTED_ATTENTION, torch.float32)
    assert find_fault(policy, packed=True) is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere", dict(logit_scale=0.3)),
        ("falcon_h1", dict(lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)),
    ],
)
def test_a_head_that_scales_is_found_by_trying(family, changes):
    policy = policy_of(random_family(family, **changes), 1, "eager", torch.float32)
    policy.has_linear_head = True
    assert find_fault(policy, packed=False) is None
    assert not policy.has_linear_head


@pytest.mark.parametrize("window", [4, 4096])
def test_an_attention_without_the_window_is_found(window):
    """However long the window: it is shortened while the model is tried."""
    model = random_family("qwen2", use_sliding_window=True, sliding_window=window, max_window_layers=0)
    policy = policy_of(model, 1, SEGMENTED_ATTENTION, torch.float32)
    assert find_fault(policy, packed=True) is None
    assert {layer.self_attn.sliding_window for layer in model.model.layers} == {model.config.sliding_window} == {window}
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "own logits" in find_fault(policy, packed=True)


def test_what_only_positions_far_apart_change_is_found():
    """A family of somebody's own that scales by the largest position of the row."""
    model = random_family("llama", max_position_embeddings=4096)
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def by_the_longest(x, position_ids):
        cos, sin = forward(x, position_ids)
        scale = 2.0 if position_ids.max() > 2048 else 1.0
        return cos * scale, sin * scale

    rotary.forward = by_the_longest
    policy = policy_of(model, 1, SEGMENTED_ATTENTION, torch.float32)
    for packed in (True, False):
        assert "a long sample changes" in find_fault(policy, packed=packed, rows=2)
    assert find_fault(policy, packed=False) is None


@pytest.mark.parametrize("window", [4, 4096])
def test_sinks_are_part_of_every_softmax(window):
    """Packed as alone, with gradients for the sinks; eager attention of this family sees across packed samples."""
    experts = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=window)
    model = random_family("gpt_oss", layer_types=["sliding_attention", "full_attention"], **experts)
    assert "packed samples see each other" in find_fault(policy_of(model, 1, "eager", torch.float32), packed=True)
    assert find_fault(policy_of(model, 1, "eager", torch.float32), packed=False) is None
    samples = [[(7 * n + 11 * k * k) % 64 for k in range(n)] for n in LENGTHS]
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    found = []
    for way, batches in (
        (SEGMENTED_ATTENTION, [token_batch(samples, CPU)]),
        ("eager", [token_batch([sample], CPU) for sample in samples]),
    ):
        policy = policy_of(model, 1, way, torch.float32)
        logprobs = torch.cat([policy(*policy.placed(batch, CPU)).logprobs[0] for batch in batches])
        found.append((logprobs.detach(), *torch.autograd.grad(logprobs.sum(), sinks)))
    assert all(bool(gradient.any()) for gradient in found[0][1:])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)
    assert find_fault(policy_of(model, 1, SEGMENTED_ATTENTION, torch.float32), packed=True) is None


@pytest.mark.parametrize("family", ["gptj", "llama4_text"])
def test_a_family_built_otherwise_is_trained_by_its_own_means(family, tmp_path):
    """One has a table of its attentions, the other no decoder apart from its head."""
    changes = dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, num_local_experts=2, intermediate_size_mlp=32)
    random_family(family, **changes).save_pretrained(tmp_path / "model")
    settings = dict(seq_packing=False, gradient_checkpointing=False)
    config = RunConfig(output_dir=str(tmp_path), model_path=str(tmp_path / "model"), finetune=settings)
    assert load_policy(config, CPU).attention in ("sdpa", "eager")
