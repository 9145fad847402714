"""A decoder of which only what a plan of servers looks at is true."""

from __future__ import annotations

from pipelinerl.world.model_shape import ModelShape, shape_of


def decoder_shape(parameters: int, layers: int, kv_heads: int, head_dim: int, context: int) -> ModelShape:
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 1}
    found = shape_of(
        sizes | {"hidden_size": 64, "num_attention_heads": kv_heads, "max_position_embeddings": context}, parameters
    )
    assert found is not None
    return found
