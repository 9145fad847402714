"""The tiny model: a Qwen2 of about half a million parameters, and its folder, which is built once and reused.

The folder is in Hugging Face format, with one more file (`tiny_model.json`): what the model was made of.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from pipelinerl.domains import guessing
from pipelinerl.tiny import tokenizer as tokenizer_module
from pipelinerl.tiny import warmup as warmup_module
from pipelinerl.tiny.tokenizer import build_tokenizer, number_token_ids
from pipelinerl.tiny.warmup import WarmupSettings, warm_up

RECORD_FILE = "tiny_model.json"
DEFAULT_ROOT = Path("results/tiny-model")
# Numbers in the vocabulary of a model that is not warmed up for a particular game.
_UNTRAINED_MAX_NUMBER = 32
_SOURCES = tuple(str(module.__file__) for module in (guessing, tokenizer_module, warmup_module))

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


def model_key(*, seed: int, tie_word_embeddings: bool, warmup: WarmupSettings | None) -> str:
    """Return a short name that changes whenever the model would: settings, seed, source code or library versions."""
    digest = hashlib.sha256()
    settings = None if warmup is None else dataclasses.asdict(warmup)
    facts = [seed, tie_word_embeddings, settings, torch.__version__, transformers.__version__]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for file in (__file__, *_SOURCES):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:12]


def build_tiny_model(
    output_dir: Path,
    *,
    seed: int,
    tie_word_embeddings: bool = False,
    warmup: WarmupSettings | None,
    progress: Callable[[str], None],
) -> Path:
    """Return `output_dir` with a tokenizer and a model in it; reuse it when it was built from the same things.

    Args:
        output_dir: becomes the model's folder; it appears complete or not at all.
        seed: for the initial weights and the warm-up.
        tie_word_embeddings: share the input and the output embeddings.
        warmup: how to warm the model up; None leaves random weights (a few seconds, for tests).
        progress: is given one line at a time.

    Raises:
        ValueError: `output_dir` holds something that is not a tiny model.
    """
    disable_progress_bar()
    key = model_key(seed=seed, tie_word_embeddings=tie_word_embeddings, warmup=warmup)
    if _recorded_key(output_dir) == key:
        progress(f"tiny model: {output_dir} is up to date")
        return output_dir
    tokenizer = build_tokenizer(_UNTRAINED_MAX_NUMBER if warmup is None else warmup.high)
    model = build_model(tokenizer, seed=seed, tie_word_embeddings=tie_word_embeddings)
    record: dict[str, object] = {"key": key, "seed": seed, "tie_word_embeddings": tie_word_embeddings, "warmup": None}
    progress(f"tiny model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, seed {seed}")
    if warmup is not None:
        result = warm_up(model, tokenizer, warmup, seed=seed, progress=progress)
        record["warmup"] = dataclasses.asdict(warmup)
        record["result"] = dataclasses.asdict(result)
        if result.cut_short:
            # not what the settings ask for: usable, but built again at the next call
            record["key"] = f"{key}-cut-short"

    output_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}-", dir=output_dir.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        if output_dir.exists():
            shutil.rmtree(output_dir)
        os.replace(scratch, output_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"tiny model: saved in {output_dir}")
    return output_dir


def _recorded_key(output_dir: Path) -> str | None:
    """Return the key of the tiny model in `output_dir`, or None when the folder is empty or absent."""
    record = output_dir / RECORD_FILE
    if record.is_file():
        try:
            return str(json.loads(record.read_text(encoding="utf-8"))["key"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{record}: not a record of a tiny model ({error}). Delete {output_dir}.") from error
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(
            f"output: {output_dir} exists and is not a tiny model; expected a new or empty folder. Choose another one."
        )
    return None


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, tie_word_embeddings: bool = False
) -> Qwen2ForCausalLM:
    """Return a model in fp32 for `tokenizer`'s vocabulary, the same for the same `seed`.

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
    `sum_f cos((d - 1) * theta_f)` when the query bias is the key bias turned back by one position: its peak is at 1.
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
