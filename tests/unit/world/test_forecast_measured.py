"""The forecast against steps that were measured on one H200 (torch 2.11): random models of 0.1 to 3.1 B parameters,
samples of 256 to 2,048 tokens, plain backend, `finetune/step.py` as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from pipelinerl.world.forecast import GIB, ServerSetup, TrainerSetup, trainer_memory
from pipelinerl.world.model_shape import ModelShape, shape_of
from pipelinerl.world.rates import (
    Layout,
    Work,
    card_machine,
    largest_micro_batch,
    server_rate,
    step_forecast,
    train_seconds,
)

#: family, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SHAPES = {
    "llama-135m": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "qwen-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "qwen-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "llama-1.2b": ("llama", 2048, 8192, 16, 32, 8, 128256, False),
    "qwen-3b": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
}
Products = Literal["bf16", "tf32", "fp32"]
#: model, `seq_length`, largest pack, tokens of the step, checkpointing, products, chunk of the head; then what was
#: seen: peak of PyTorch's tensors in GiB, seconds of a step. None: the code has changed since, or the host had other
#: work. Layers with bf16 products were compiled, but for those of `PLAIN`, which are of whole runs.
Step = tuple[str, int, int, int, bool, Products, int, float | None, float | None]
STEPS: list[Step] = [
    ("qwen-0.5b", 16384, 14704, 131615, False, "bf16", 4096, None, 1.189),
    ("qwen-0.5b", 16384, 14704, 131615, True, "bf16", 4096, None, 1.424),
    ("qwen-0.5b", 16384, 16311, 64664, False, "bf16", 1024, 26.2, 0.623),
    ("qwen-0.5b", 4096, 4056, 66446, False, "bf16", 4096, 15.92, 0.928),
    ("qwen-0.5b", 4096, 4052, 15908, False, "bf16", 1024, 14.46, 0.28),
    ("llama-135m", 16384, 15816, 62747, False, "bf16", 1024, 11.13, None),
    ("qwen-1.5b", 8192, 8185, 32506, False, "bf16", 1024, 45.27, 0.727),
    ("llama-1.2b", 8192, 8157, 31929, False, "bf16", 1024, 37.62, 0.574),
    ("llama-135m", 4096, 3383, 16388, False, "tf32", 1024, 13.05, 1.163),
    ("llama-1.2b", 4096, 3745, 17248, True, "fp32", 1024, 33.56, 4.462),
]
PLAIN: list[Step] = [
    ("llama-135m", 32768, 25131, 75393, False, "bf16", 4096, 24.71, None),
    ("llama-135m", 16384, 16384, 114322, False, "bf16", 1024, 16.91, None),
]
MEAN_TOKENS, PROMPT_SHARE = 1150, 0.25


def shape(name: str) -> ModelShape:
    family, hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    found = shape_of(
        {
            **{"model_type": family, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
            **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary},
            **{"tie_word_embeddings": tied},
        }
    )
    assert found is not None
    return found


@pytest.mark.parametrize("row", [*STEPS, *PLAIN], ids=lambda row: "-".join(map(str, row[:7])))
def test_memory_and_time_of_a_measured_step(row: Step) -> None:
    """Memory within 10 % and never below what was seen by more than 3 %; time within 20 %."""
    name, _, pack, tokens, checkpointing, products, chunk, peak_gib, seconds = row
    setup = TrainerSetup(
        shape(name),
        products=products,
        pack_tokens=pack,
        checkpointing=checkpointing,
        chunk_tokens=chunk,
        longest=2048,
        compiled=row not in PLAIN,
    )
    if peak_gib is not None:
        assert 0.97 * peak_gib <= trainer_memory(setup).tensors / GIB <= 1.1 * peak_gib
    samples = round(tokens / MEAN_TOKENS)
    work = Work(samples, MEAN_TOKENS * PROMPT_SHARE, MEAN_TOKENS * (1 - PROMPT_SHARE), 64)
    if seconds is not None:
        assert train_seconds(setup, work, card_machine("NVIDIA H200")) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("tokens", "computed", "peak_gib", "reserved_gib"), [(75569, 4224, 6.92, 6.93), (48772, 22804, 15.43, None)]
)
def test_memory_of_a_measured_step_with_shared_prefixes(
    tokens: int, computed: int, peak_gib: float, reserved_gib: float | None
) -> None:
    """One micro-batch of 512 samples, most of whose prompts are kept once. Reserve with expandable segments."""
    setup = TrainerSetup(shape("llama-135m"), pack_tokens=32768, checkpointing=False, chunk_tokens=4096, longest=1024)
    memory = trainer_memory(largest_micro_batch(setup, tokens, computed))
    assert 0.97 * peak_gib <= memory.tensors / GIB <= 1.1 * peak_gib
    if reserved_gib is not None:
        assert 0.97 * reserved_gib <= memory.reserved / GIB <= 1.1 * reserved_gib


def test_the_rows_of_a_step_are_filled_evenly() -> None:
    setup = TrainerSetup(shape("llama-135m"), pack_tokens=1000, checkpointing=False)
    assert setup.shared_room == 0.125
    # 600 computed and 100 of 800 shared ones: one row. Of twice as many, two rows, one of them 3 % longer.
    short, long = largest_micro_batch(setup, 1400, 600), largest_micro_batch(setup, 2800, 1200)
    assert (short.pack_tokens, short.shared_tokens) == (600, 800)
    assert (long.pack_tokens, long.shared_tokens) == (618, 800)
    of_two_ranks = largest_micro_batch(replace(setup, ranks=2), 2800, 1200)
    assert (of_two_ranks.pack_tokens, of_two_ranks.shared_tokens) == (600, 800)
    # No row is longer than 1000: 1990 tokens are two rows of 995.
    assert largest_micro_batch(setup, 1990, 1990).pack_tokens == 1000
    # Other attention keeps shared tokens in full.
    whole = largest_micro_batch(replace(setup, products="tf32"), 700, 300)
    assert (whole.pack_tokens, whole.shared_tokens) == (700, 0)


def test_time_of_a_measured_step_with_shared_prefixes() -> None:
    """512 short answers to long prompts, in one micro-batch: 0.169 s beside four servers, under MPS."""
    setup = TrainerSetup(shape("llama-135m"), products="bf16", pack_tokens=32768, checkpointing=False)
    work = Work(512, 138, 9.3, 64, computed_tokens=6.7)
    assert train_seconds(setup, work, card_machine("NVIDIA H200")) == pytest.approx(0.169, rel=0.2)


@pytest.mark.parametrize(
    ("servers", "shared", "computed", "seconds"),
    [(4, True, 6.7, 0.69), (4, False, None, 0.82), (1, False, None, 1.31)],
    ids=["one GPU", "two GPUs", "two GPUs, one server"],
)
def test_time_of_a_step_in_turns(servers: int, shared: bool, computed: float | None, seconds: float) -> None:
    """512 short answers to long prompts; the runs on two GPUs shared no prefixes."""
    trainer = TrainerSetup(shape("llama-135m"), products="bf16", pack_tokens=32768, checkpointing=False, compiled=True)
    server = ServerSetup(shape("llama-135m"), max_sequences=512)
    layout = Layout(servers, on_card=servers, shared=shared, turns=True, sleeps=shared)
    work = Work(512, 138, 9.3, 512, computed_tokens=computed)
    found = step_forecast(trainer, server, layout, work, card_machine("NVIDIA H200"))
    assert found.step_s == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("sequences", "low", "high"), [(512, 9_000, 15_000), (256, 11_065, 15_667), (128, 14_000, 20_000)]
)
def test_tokens_per_second_of_one_server(sequences: int, low: float, high: float) -> None:
    """Uneven answers of 135 M: within a factor of 1.2 of the range that was seen."""
    work = Work(512, 64, 256, sequences)
    rate = server_rate(ServerSetup(shape("llama-135m"), max_sequences=512), work, card_machine("NVIDIA H200"))
    assert low / 1.2 < rate < high * 1.2
