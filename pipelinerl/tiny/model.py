"""The tiny model: a Qwen2 of about half a million parameters with randomly drawn weights.

Called by the build of the tiny model. Waits for nothing.
"""

import math

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.tiny.tokenizer import number_token_ids

HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 384
NUM_LAYERS = 2
NUM_HEADS = 4
MAX_POSITIONS = 1024
# A low base gives every head frequencies that tell neighbouring positions apart; the prompts are short.
ROPE_THETA = 100.0
# Larger than 1: logits can spread from the start, so that a few hundred steps are enough to rule tokens out.
FINAL_NORM = 5.0
_FREQUENCIES = 12
_LOOK_BACK_BIAS = 4.0


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, tie_word_embeddings: bool = False
) -> Qwen2ForCausalLM:
    """Return a model in fp32 for ``tokenizer``'s vocabulary, the same for the same ``seed``.

    The embeddings of numbers start as smooth functions of the number, so that order does not have to be learned from
    single examples; everything else is random.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        _order_numbers(model, tokenizer)
        _look_back(model)
        torch.nn.init.constant_(model.model.norm.weight, FINAL_NORM)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


@torch.no_grad()
def _order_numbers(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = number_token_ids(tokenizer)
    numbers = torch.tensor(sorted(ids), dtype=torch.float32)
    rows = torch.tensor([ids[int(number)] for number in numbers])
    phase = math.pi * (numbers / numbers.max())[:, None] * torch.arange(1, _FREQUENCIES + 1)
    features = torch.cat([phase.sin(), phase.cos()], dim=1)
    projection = torch.randn(features.shape[1], model.config.hidden_size)
    smooth = features @ projection
    smooth *= model.config.initializer_range / smooth.std()
    embedding = model.model.embed_tokens.weight
    embedding[rows] = smooth + 0.1 * embedding[rows]
    if not model.config.tie_word_embeddings:
        head = model.lm_head.weight
        head[rows] = smooth + 0.1 * head[rows]


@torch.no_grad()
def _look_back(model: Qwen2ForCausalLM) -> None:
    """Let half of the first layer's heads start by attending to the previous token.

    With constant query and key biases the score depends only on the distance d, through the rotary embedding: it is
    ``sum_f cos((d - 1) * theta_f)`` when the query bias is the key bias turned back by one position: its peak is at 1.
    The relation ("is lower") follows its number, so this is the first thing that the warm-up would have to find.
    """
    head_size = model.config.hidden_size // model.config.num_attention_heads
    half = head_size // 2
    theta = ROPE_THETA ** (-torch.arange(half) / half)
    attention = model.model.layers[0].self_attn
    key = torch.cat([torch.ones(half), torch.zeros(half)]) * _LOOK_BACK_BIAS
    query = torch.cat([theta.cos(), -theta.sin()]) * _LOOK_BACK_BIAS
    for head in range(model.config.num_attention_heads // 2):
        rows = slice(head * head_size, (head + 1) * head_size)
        attention.k_proj.bias[rows] = key
        attention.q_proj.bias[rows] = query
