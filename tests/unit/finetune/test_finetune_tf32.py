"""`finetune.dtype=tf32`: products of the body may be in TF32, those of head and positions are exact, weights fp32."""

from __future__ import annotations

import pytest
import torch
from fakes.matrix_products import MatrixProducts, to_tf32

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import load_policy, load_reference
from pipelinerl.finetune.model_check import tf32_difference, token_batch
from pipelinerl.finetune.policy import (
    PolicyModel,
    allowed_products,
    backbone,
    fp32_products,
    keep_exact,
    token_logprobs,
)
from pipelinerl.finetune.probe import probe_tolerance
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.step import StepRunner

SAMPLE = [3, 14, 15, 9, 26, 5, 35, 8]
CPU = torch.device("cpu")


class RotaryByProduct(torch.nn.Module):
    """Angles of positions by a matrix product, as some families and versions of transformers compute them."""

    def __init__(self, head_size=8, base=10000.0):
        super().__init__()
        self.register_buffer("inverse", base ** (-torch.arange(0, head_size, 2) / head_size))

    def forward(self, x, position_ids):
        angles = (self.inverse[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()


def with_products(kit, attention="pipelinerl_segments", **options):
    model = kit.model(attention=attention)
    model.model.rotary_emb = RotaryByProduct()
    # The angles of later positions are larger than TF32 can hold.
    model.config.max_position_embeddings = 8192
    return PolicyModel(model, **options)


def step_of(kit, policy):
    config = kit.config()
    runner = StepRunner(PlainBackend(policy, config, Ranks()), config, Ranks())
    runner.accumulate(kit.batch(kit.samples(4), plan=[[list(range(4))]]))


def config_of(kit, tmp_path, model=None, **finetune):
    (model or kit.model()).save_pretrained(tmp_path / "model")
    kit.tokenizer(tmp_path / "model")
    settings = {"dtype": "tf32", "gradient_checkpointing": False, **finetune}
    return RunConfig(output_dir=str(tmp_path), model_path=str(tmp_path / "model"), finetune=settings)


def test_tf32_keeps_ten_bits_of_mantissa():
    assert to_tf32(torch.tensor([1.0, 2047.0, 2049.0, 2051.0, 1 + 2**-11, 1 + 2**-10, -3.0])).tolist() == [
        *(1.0, 2047.0, 2048.0, 2052.0, 1.0, 1 + 2**-10, -3.0)
    ]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_allows_tf32_around_the_body_only(kit, checkpointing):
    policy = with_products(kit, tf32=True)
    if checkpointing:
        policy.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    before = allowed_products()
    with MatrixProducts() as products:
        step_of(kit, policy)
    head = [product for product in products.seen if product.has(kit.vocabulary)]
    positions = [product for product in products.seen if product.inner == 1]
    body = [product for product in products.seen if product not in head and product not in positions]
    # Logits twice (forward, and again in backward), and the two gradients.
    assert len(head) == 4
    assert positions
    assert not any(product.in_tf32 for product in [*head, *positions])
    # Seven linear layers in each of two decoder layers, with two products each in backward. Of what is computed again,
    # the last product of a layer is left out: nothing needs its result.
    assert len(body) == 2 * 7 * 3 + (2 * 6 if checkpointing else 0)
    assert all(product.in_tf32 for product in body)
    assert allowed_products() == before != "tf32"


@torch.no_grad()
def test_log_probs_are_those_of_an_exact_head_on_a_rounded_body(kit):
    batch = token_batch([SAMPLE], CPU)
    policy = kit.policy(tf32=True)
    layout = policy.layout_of(batch)
    with MatrixProducts(rounds=True):
        ours = policy(batch, layout).logprobs
        with fp32_products("tf32"):
            hidden = backbone(policy.language_model)(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, segment_layout=layout
            )[0]
    expected, _ = token_logprobs(hidden, policy.language_model.get_output_embeddings().weight, batch.targets)
    assert torch.equal(ours, expected)
    exact = kit.policy()(batch, layout).logprobs
    assert 1e-5 < float((ours - exact).abs().mean()) < 0.02


def test_rounded_positions_are_found(kit):
    known, unknown = with_products(kit, tf32=True), with_products(kit)
    with MatrixProducts(rounds=True):
        assert tf32_difference(known) < 0.02
        # Its rotary embedding was not told to stay exact.
        assert tf32_difference(unknown) > 0.1
    assert tf32_difference(unknown) == 0.0


def test_a_loaded_policy_has_fp32_weights_and_so_has_its_reference(kit, tmp_path):
    config = config_of(kit, tmp_path, rl={"kl_coef": 0.1})
    policy = load_policy(config, CPU)
    assert (policy.tf32, policy.compute_dtype) == (True, torch.float32)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    reference = load_reference(config, policy, CPU, has_servers=False)
    assert reference._model.tf32


def test_a_model_that_needs_exact_positions_and_hides_them_is_refused(kit, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.finetune.model.tf32_difference", lambda policy: 0.7)
    with pytest.raises(ConfigError, match=r"TF32 products change its log-probs by 0.7; use finetune.dtype=fp32"):
        load_policy(config_of(kit, tmp_path), CPU)


def test_a_model_whose_own_head_would_be_in_tf32_is_refused(kit, tmp_path):
    model = kit.model("llama")
    model.config.logit_scale = 0.5
    config = config_of(kit, tmp_path, model)
    with pytest.raises(ConfigError, match=r"finetune.dtype: got 'tf32', expected fp32 or bf16"):
        load_policy(config, CPU)
    assert load_policy(config.model_copy(update={"fp32_lm_head": False}), CPU).tf32


def test_a_module_that_raises_leaves_the_setting_as_it_was():
    class Broken(torch.nn.Module):
        def forward(self):
            assert allowed_products() == "ieee"
            raise KeyError("broken")

    module = Broken()
    keep_exact(module)
    with fp32_products("tf32"):
        with pytest.raises(KeyError):
            module()
        assert allowed_products() == "tf32"


@pytest.mark.parametrize(
    ("computed", "tf32", "server", "tolerance"),
    [
        (torch.float32, False, "float32", 1e-3),
        (torch.float32, False, None, 1e-3),
        (torch.float32, False, "float16", 0.03),
        (torch.float32, True, "float16", 0.03),
        (torch.float32, True, "float32", 0.03),
        (torch.float32, True, "bfloat16", 0.25),
        (torch.bfloat16, False, "float16", 0.25),
        (torch.bfloat16, False, None, 0.25),
    ],
)
def test_the_probe_allows_for_the_coarser_rounding(computed, tf32, server, tolerance):
    assert probe_tolerance(computed, tf32, server) == tolerance
