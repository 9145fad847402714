"""A Qwen2 of 0.1 M parameters with random weights and a word tokenizer: enough to compare log-probs."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 200
MAX_POSITIONS = 512


def random_model(tied: bool = True, seed: int = 0, head_size: int = 32) -> Qwen2ForCausalLM:
    """The model alone, fp32, two heads of `head_size`. The vocabulary is no multiple of 64, so the server pads it."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=2 * head_size,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float().eval()


def save_random_model(folder: Path, tied: bool = True, seed: int = 0, head_size: int = 32) -> Path:
    """Save model and tokenizer in Hugging Face format; returns `folder`."""
    random_model(tied, seed, head_size).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int, scale: float = 0.05) -> None:
    """Change every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device))


@torch.no_grad()
def model_logprobs(model: torch.nn.Module, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """log p(token_ids[i + 1] | token_ids[: i + 1]) of a full forward pass, one fewer than ids."""
    ids = torch.tensor(token_ids, device=next(model.parameters()).device)
    logprobs = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, dim=-1)
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()


def random_ids(count: int, seed: int) -> list[int]:
    """Ordinary token ids (no special ones)."""
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
