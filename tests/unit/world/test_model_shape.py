"""Sizes of models from their configuration, against published counts and against transformers' own models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.world.forecast import WEIGHTS, TrainerSetup, held_memory
from pipelinerl.world.model_shape import guess_shape, shape_of

QWEN_7B = dict(
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)


def test_qwen_7b_by_hand() -> None:
    """Embedding and head 2 x 152064 x 3584; a layer has 2 x 3584^2 + 2 x 3584 x 512 + 3 x 3584 x 18944 in matrices."""
    shape = shape_of(QWEN_7B)
    assert shape is not None
    layer = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert shape.layer_matrices == 28 * layer
    assert shape.parameters == 7_615_616_512
    assert shape.weight_bytes("bfloat16") == 15_231_233_024
    assert shape.kv_bytes() == 28 * 2 * 4 * 128 * 2
    assert guess_shape("Qwen/Qwen2.5-7B-Instruct") is not None
    assert guess_shape("Qwen/Qwen2.5-7B-Instruct").parameters == shape.parameters  # type: ignore[union-attr]


@pytest.mark.parametrize("counted", [3_000_000_000, 30_000_000_000])
def test_layers_of_other_kinds_than_are_counted(counted: int) -> None:
    """No more matrices than the weight files hold; what the formula does not know is no norm or bias."""
    shape, computed = shape_of(QWEN_7B, counted), shape_of(QWEN_7B)
    assert shape is not None and computed is not None
    assert (shape.parameters, shape.vectors) == (counted, 28 * (2 * 3584 + 3584 + 2 * 512) + 3584)
    rest = counted - 2 * 152064 * 3584 - shape.vectors
    assert shape.layer_matrices == shape.active_matrices == min(computed.layer_matrices, rest)
    weights = held_memory(TrainerSetup(shape, lora_rank=8, lora_matrices=0))[WEIGHTS]
    wide = 152064 * 3584 + shape.vectors
    assert weights == 2 * (counted - wide) + 4 * wide  # frozen matrices in 16 bits


SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=512)
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", dict(num_key_value_heads=2)),
        ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
        ("qwen3", dict(num_key_value_heads=2, head_dim=32)),
        ("gemma2", dict(num_key_value_heads=2, head_dim=16)),
        ("qwen3_moe", MOE),
        ("mixtral", dict(num_local_experts=4, num_key_value_heads=2)),
        (
            "deepseek_v3",
            dict(
                **dict(kv_lora_rank=32, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
                **dict(n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=1),
                **dict(num_key_value_heads=4, n_group=1, topk_group=1),
            ),
        ),
    ],
)
def test_counts_are_those_of_transformers(family: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **SMALL, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(json.loads(config.to_json_string(use_diff=False)))
    assert shape is not None
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.003)
    assert shape.tied == config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "billions"),
    [("meta/Model-32B-chat", 32.76), ("a/b-135M", 0.135), ("x/llama3-8b", 8.0), ("tiny", None), ("model-v2", None)],
)
def test_a_name_is_a_guess(name: str, billions: float | None) -> None:
    shape = guess_shape(name)
    assert (shape is None) == (billions is None)
    if shape is not None and billions is not None:
        assert shape.source == "name"
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.06)


def test_what_is_no_decoder_has_no_shape() -> None:
    assert shape_of({"model_type": "qwen2"}) is None
    assert shape_of({}) is None
