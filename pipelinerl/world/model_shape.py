"""Sizes of a language model from its `config.json`: parameters, bytes, cache of a token. Plain arithmetic, no torch.

The count is that of transformers' decoders: embeddings, attention (with biases and norms of a head where the family has
them, or compressed keys and values), gated or plain layers in between, experts, norms. Where the headers of the weight
files were read, their count is taken instead. A name such as `Qwen2.5-7B` is only a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

#: Families whose layers between attention have two matrices, not three.
_PLAIN_MLP = frozenset(("gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "bloom", "falcon", "nemotron"))
#: Families that tie the output head to the embedding where their configuration does not say.
_TIED = ("gemma", "gpt2", "opt", "bloom", "cohere", "starcoder2")
#: Families with biases at queries, keys and values that their configuration does not mention.
_BIASED = ("qwen2", "gpt2", "opt", "bloom", "starcoder2")
#: Families that normalize queries and keys by head.
_HEAD_NORMS = ("qwen3", "gemma3", "olmo2")
_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
#: Qwen2.5 by billions of parameters: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied.
_BY_SIZE = {
    0.5: (896, 4864, 24, 14, 2, 151936, True),
    1.5: (1536, 8960, 28, 12, 2, 151936, True),
    3: (2048, 11008, 36, 16, 2, 151936, True),
    7: (3584, 18944, 28, 28, 4, 152064, False),
    14: (5120, 13824, 48, 40, 8, 152064, False),
    32: (5120, 27648, 64, 40, 8, 152064, False),
    72: (8192, 29568, 80, 64, 8, 152064, False),
}
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class ModelShape:
    """A decoder. `source` says where its sizes come from; sizes by a name are a guess.

    Attributes:
        parameters: all values, a tied head once.
        layer_matrices: values in the matrices of all decoder layers, all experts included, as far as they are known.
        vectors: norms and biases.
        active_matrices: those of them that one token passes through.
        kv_values: values that the cache keeps of one token.
        context: positions that it was made for; 0: not stated.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    parameters: int
    layer_matrices: int
    vectors: int
    active_matrices: int
    kv_values: int
    context: int = 0
    source: Literal["weight files", "config.json", "name"] = "config.json"
    dtype: str = "bfloat16"

    @property
    def embedding(self) -> int:
        """Values of the embedding; of a head that is not tied there are as many."""
        return self.vocabulary * self.hidden

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of the weights in `dtype`; None: that of the checkpoint."""
        return self.parameters * _BYTES.get((dtype or self.dtype).lower(), 2)

    def kv_bytes(self, dtype_bytes: float = 2) -> float:
        """Bytes of the cache of one token."""
        return self.kv_values * dtype_bytes


def shape_of(config: Mapping[str, Any], parameters: int | None = None) -> ModelShape | None:
    """The shape that a `config.json` describes; None if it lacks the sizes of a decoder.

    Args:
        config: of the text model.
        parameters: counted from the weight files; None: computed.
    """

    def size(*names: str, default: int = 0) -> int:
        values = (config.get(name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), default)

    family = str(config.get("model_type", ""))
    hidden, layers = size("hidden_size", "n_embd", "d_model"), size("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = size("num_attention_heads", "n_head", "num_heads"), size("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    kv_heads = size("num_key_value_heads", default=heads)
    head_dim = size("head_dim", default=hidden // heads)
    inner = size("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    matrices = 2 if family in _PLAIN_MLP else 3
    attention, attention_vectors, kv_values = _attention(config, family, hidden, heads, kv_heads, head_dim)
    experts = size("num_experts", "num_local_experts", "n_routed_experts")
    expert_inner = size("moe_intermediate_size", default=inner)
    shared = size("n_shared_experts") * expert_inner + size("shared_expert_intermediate_size")
    dense = min(size("first_k_dense_replace"), layers) if experts else layers
    expert = matrices * hidden * expert_inner
    chosen = min(experts, size("num_experts_per_tok", "num_experts_per_token", default=2))
    outside = matrices * hidden * shared + hidden * experts
    sparse = layers - dense
    all_matrices = layers * attention + dense * matrices * hidden * inner + sparse * (experts * expert + outside)
    active = layers * attention + dense * matrices * hidden * inner + sparse * (chosen * expert + outside)
    tied = config.get("tie_word_embeddings")
    is_tied = tied if isinstance(tied, bool) else family.startswith(_TIED)
    vectors = layers * (2 * hidden + attention_vectors) + hidden
    heads_and_vectors = vocabulary * hidden * (1 if is_tied else 2) + vectors
    if parameters:  # the weight files may hold less than a decoder of these sizes has (or more: other kinds of layers)
        all_matrices = min(all_matrices, max(0, parameters - heads_and_vectors))
    stated = config.get("dtype") or config.get("torch_dtype")
    return ModelShape(
        hidden=hidden,
        intermediate=inner if dense == layers else chosen * expert_inner + shared,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=is_tied,
        parameters=parameters or all_matrices + heads_and_vectors,
        layer_matrices=all_matrices,
        vectors=vectors,
        active_matrices=min(active, all_matrices),
        kv_values=layers * kv_values,
        context=size("max_position_embeddings", "n_positions"),
        source="weight files" if parameters else "config.json",
        dtype=stated if isinstance(stated, str) else "float32",
    )


def _attention(
    config: Mapping[str, Any], family: str, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Values of the matrices of one layer's attention, of its vectors, and of the cache of one token."""
    rank = config.get("kv_lora_rank")
    if isinstance(rank, int) and rank:  # keys and values are kept compressed
        rope, plain = int(config.get("qk_rope_head_dim") or 0), int(config.get("qk_nope_head_dim") or head_dim)
        values, query_rank = int(config.get("v_head_dim") or head_dim), config.get("q_lora_rank") or 0
        width = heads * (plain + rope)
        query = hidden * query_rank + query_rank * width if query_rank else hidden * width
        matrices = query + hidden * (rank + rope) + rank * heads * (plain + values) + heads * values * hidden
        return matrices, rank + query_rank, rank + rope
    width, kv_width = heads * head_dim, kv_heads * head_dim
    is_biased = bool(config.get("attention_bias")) or family.startswith(_BIASED)
    vectors = (width + 2 * kv_width if is_biased else 0) + (2 * head_dim if family.startswith(_HEAD_NORMS) else 0)
    return 2 * hidden * width + 2 * hidden * kv_width, vectors, 2 * kv_width


def guess_shape(name: str) -> ModelShape | None:
    """A guess by the size in the name of a model (`Qwen/Qwen2.5-7B`); None if it has none."""
    found = _SIZE_IN_NAME.search(name.replace("-", " ").replace("/", " ").replace("_", " "))
    if found is None:
        return None
    billions = float(found.group(1)) * (1e-3 if found.group(2).lower() == "m" else 1)
    if billions <= 0:
        return None
    nearest = min(_BY_SIZE, key=lambda size: abs(math.log(size / billions)))
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = _BY_SIZE[nearest]
    shape = shape_of(
        {
            **{"model_type": "qwen2", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
            **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary},
            **{"tie_word_embeddings": tied, "dtype": "bfloat16", "max_position_embeddings": 32768},
        }
    )
    assert shape is not None
    if abs(math.log(nearest / billions)) < 0.2:
        return replace(shape, source="name")
    factor = billions * 1e9 / shape.parameters
    return replace(
        shape,
        parameters=round(billions * 1e9),
        layer_matrices=round(shape.layer_matrices * factor),
        active_matrices=round(shape.active_matrices * factor),
        intermediate=round(inner * factor**0.5),
        source="name",
    )
