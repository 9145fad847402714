"""Memory by hand for a few shapes: what is held, what activations add, what no change of packs can help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelinerl.run.fit import remedies
from pipelinerl.world.forecast import (
    ACTIVATIONS,
    CACHE,
    COPIES,
    GIB,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    REFERENCE,
    RESTS,
    SERVED,
    STEP,
    WEIGHTS,
    ServerSetup,
    TrainerSetup,
    cache_tokens,
    least_memory,
    server_memory,
    trainer_memory,
)
from pipelinerl.world.model_shape import ModelShape, guess_shape, shape_of
from pipelinerl.world.rates import (
    Layout,
    StepForecast,
    Work,
    card_machine,
    cpu_machine,
    server_rate,
    step_forecast,
    train_seconds,
)

P_7B, E_7B = 7_615_616_512, 152064 * 3584
CARD_80, CARD_141 = 79.6 * GIB, 139.8 * GIB


def shape(billions: str) -> ModelShape:
    found = guess_shape(f"Qwen2.5-{billions}B")
    assert found is not None
    return found


def test_a_plain_rank_of_7_b() -> None:
    """16 bytes a value held or accumulated, and 4 more inside AdamW: 142 GiB at its peak, with packs of any length."""
    setup = TrainerSetup(shape("7"))
    parts = trainer_memory(setup).parts
    assert parts[WEIGHTS] == 4 * P_7B
    assert parts[OPTIMIZER] == 8 * P_7B
    assert parts[GRADIENTS] == 4 * P_7B
    assert parts[STEP] == 4 * P_7B
    vectors = 28 * (2 * 3584 + 3584 + 2 * 512) + 3584
    assert parts[RESTS] == 4 * (E_7B + vectors)
    work_space = 0.08 * GIB
    assert trainer_memory(setup).tensors == pytest.approx(20 * P_7B + 4 * (E_7B + vectors) + work_space)
    assert least_memory(setup) > CARD_80
    assert least_memory(setup) < CARD_141 < trainer_memory(setup).total


def test_zero_3_on_eight_cards_fits_7_b() -> None:
    setup = TrainerSetup(shape("7"), ranks=8, sharding="zero3")
    memory = trainer_memory(setup)
    assert memory.parts[OPTIMIZER] == P_7B
    with_reference = trainer_memory(replace(setup, reference="device"))
    assert with_reference.parts[REFERENCE] == 2 * P_7B / 8
    assert trainer_memory(replace(setup, reference="device", sharding="zero2")).parts[REFERENCE] == 2 * P_7B
    assert memory.total < CARD_80 / 2


def test_zero_3_steps_over_a_sub_group_at_a_time() -> None:
    """A copy of its gradients and a root of its second moment; the last matrix of a group may go beyond its size."""
    setup = TrainerSetup(shape("7"), ranks=2, sharding="zero3", pack_tokens=512, chunk_tokens=64)
    assert trainer_memory(setup).parts[STEP] == 8 * (10**9 + E_7B / 2)
    assert STEP not in trainer_memory(replace(setup, sub_group=10**8)).parts


@pytest.mark.parametrize("room", [CARD_80, CARD_141])
def test_32_b_in_full_on_one_card(room: float) -> None:
    setup = TrainerSetup(shape("32"))
    assert least_memory(setup) > 3 * room
    found = {each.overrides: each.peak for each in remedies(setup, room, 64 * GIB, 1, 10000)}
    assert not any(words.startswith("finetune.seq_length") for words in found)
    assert any("num_finetune_ranks=" in words for words in found)
    assert ("finetune.lora.enabled=true" in found) == (room == CARD_141)
    assert all(peak <= room for peak in found.values())


def test_activations_of_a_layer_by_hand() -> None:
    """0.5 B without checkpointing, bf16 products: bytes of a token in one layer, times 24, and the end of the model,
    with the gradients that its backward pass begins with. Compiled, and as they are in padded rows."""
    hidden, inner, wide, kv_wide = 896, 4864, 14 * 64, 2 * 2 * 64
    attention, end = 2 * (2 * wide + kv_wide) + 4 * 14, (2 * 4 + 2 * 2 + 14) * hidden
    setup = TrainerSetup(shape("0.5"), pack_tokens=16384, checkpointing=False)
    parts = trainer_memory(setup).parts
    compiled = (4 + 2 + 2 + 2) * hidden + 2 * 4 + attention + 3 * 2 * inner
    assert parts[ACTIVATIONS] == 16384 * (24 * compiled + end)
    norms, casts = 2 * (4 + 4) * hidden + 2 * 4, (3 + 2) * 2 * hidden
    plain = norms + casts + attention + 4 * 2 * inner
    assert trainer_memory(replace(setup, compiled=False)).parts[ACTIVATIONS] == 16384 * (24 * plain + end)
    assert parts[COPIES] == 2 * setup.shape.layer_matrices
    chunk, head = 1024 * 151936, 151936 * 896
    assert parts[LOGITS] == (2 + 4) * head + max(6 * chunk, 4 * head + 2 * chunk)
    kept = trainer_memory(replace(setup, checkpointing=True))
    assert kept.parts[ACTIVATIONS] < parts[ACTIVATIONS] / 8
    assert trainer_memory(replace(setup, chunk_tokens=4096)).total > trainer_memory(setup).total


def test_adapters_need_no_state_of_the_model() -> None:
    memory = trainer_memory(TrainerSetup(shape("7"), lora_rank=16))
    width, kv_width = 3584, 512
    sides = 2 * (3584 + width) + 2 * (3584 + kv_width) + 3 * (3584 + 18944)
    trained = 16 * 28 * sides
    assert memory.parts[OPTIMIZER] == 8 * trained
    narrow, wide = P_7B - E_7B - (28 * (2 * 3584 + 4608) + 3584), E_7B + 28 * (2 * 3584 + 4608) + 3584
    assert memory.parts[WEIGHTS] == 2 * narrow + 4 * wide + 4 * trained
    assert memory.total < CARD_80 / 2


def test_the_cache_is_what_a_server_has_left() -> None:
    setup = ServerSetup(shape("7"), share=0.9, fp32_head=False)
    memory = server_memory(setup, CARD_80)
    assert memory.parts[SERVED] == 2 * P_7B
    assert memory.total == pytest.approx(0.9 * CARD_80)
    assert cache_tokens(setup, memory) == pytest.approx(memory.parts[CACHE] / 57344)
    halves = server_memory(replace(setup, gpus=2), CARD_80)
    assert halves.parts[SERVED] == P_7B
    assert server_memory(replace(setup, cache_bytes=GIB), CARD_80).parts[CACHE] == GIB
    assert server_memory(ServerSetup(shape("72")), CARD_80).parts[CACHE] < 0


def test_times_follow_the_work() -> None:
    card = card_machine("NVIDIA H200")
    setup, server = TrainerSetup(shape("0.5"), checkpointing=False), ServerSetup(shape("0.5"))
    work = Work(samples=512, prompt_tokens=64, output_tokens=256, concurrency=256)
    twice = replace(work, samples=1024)
    assert train_seconds(setup, twice, card) == pytest.approx(2 * train_seconds(setup, work, card), rel=0.1)
    assert train_seconds(replace(setup, checkpointing=True), work, card) > 1.15 * train_seconds(setup, work, card)
    assert server_rate(server, work, card) > 3 * server_rate(server, replace(work, concurrency=16), card)
    slow = cpu_machine(16 * GIB, 2)
    assert train_seconds(setup, work, slow) > 50 * train_seconds(setup, work, card)


def test_tokens_that_are_shared_take_time_only_in_attention_and_head() -> None:
    """A prompt of 900 tokens for 8 answers of 100: 900 / 8 + 100 tokens of a sample."""
    setup, card = TrainerSetup(shape("1.5"), checkpointing=False, pack_tokens=100_000), card_machine("h200")
    whole = train_seconds(setup, Work(800, 900.0, 100.0, 64, 1000.0), card)
    assert whole == train_seconds(setup, Work(800, 900.0, 100.0, 64), card)
    shared = train_seconds(setup, Work(800, 900.0, 100.0, 64, 212.5), card)
    assert 0.2 * whole < shared < 0.4 * whole


def test_lag_of_either_limit() -> None:
    """Slow servers: 256 of 512 samples are in progress, so a token is a quarter of a step old and waits for half of
    one. A slow trainer: the batch that waits was sampled by the version before."""
    card, work = card_machine("NVIDIA H200"), Work(512, 64, 256, 256)
    trainer, server = TrainerSetup(shape("0.5")), ServerSetup(shape("0.5"))

    def lag(layout: Layout) -> float:
        return step_forecast(trainer, server, layout, work, card).lag

    assert lag(Layout(1)) == pytest.approx(0.75)
    assert lag(Layout(100)) == 1.0
    assert lag(Layout(100, ahead=3.0)) == 2.0
    assert lag(Layout(1, turns=True)) == 0


def test_servers_on_one_card_share_it() -> None:
    """Hosts side by side until the card is full."""
    card, work, server = card_machine("NVIDIA H200"), Work(512, 64, 256, 256), ServerSetup(shape("0.5"))
    alone, four = (server_rate(server, work, card, on_card) for on_card in (1, 4))
    assert four == pytest.approx(alone)
    assert server_rate(server, work, card, 100) < alone / 2


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6),
        ("NVIDIA H100 NVL", 93.6),
        ("NVIDIA GH200 480GB", 95.6),
        ("NVIDIA A100-SXM4-40GB", 39.4),
        ("NVIDIA A100-SXM4-80GB", 79.2),
        ("NVIDIA L40", 44.4),
        ("NVIDIA L4", 22.1),
        ("l40s", 44.4),
    ],
)
def test_a_card_is_found_by_whole_words(name: str, gib: float) -> None:
    assert card_machine(name).memory_bytes == gib * GIB


def test_processes_that_run_rollouts_bound_short_answers() -> None:
    card, trainer, server = card_machine("NVIDIA H200"), TrainerSetup(shape("0.5")), ServerSetup(shape("0.5"))

    def step(output: int, workers: int) -> StepForecast:
        return step_forecast(trainer, server, Layout(8, workers=workers), Work(10_000, 50, output, 512, 4), card)

    assert step(10, 1).generate_s == pytest.approx(5.0) and step(10, 2).generate_s == pytest.approx(2.5)
    assert step(10, 1).needs_workers and "actor.rollout_workers" in step(10, 1).waits
    assert step(10, 1).server_tokens_s == step(10, 8).server_tokens_s, "the servers' own rate"
    assert step(500, 1).generate_s == step(500, 8).generate_s > 5.0
    assert not step(500, 1).needs_workers and "actor.rollout_workers" not in step(500, 1).waits


@pytest.mark.parametrize(("mps", "seen_s"), [(False, 4.55), (True, 1.70)])
def test_a_trainer_beside_four_servers(mps: bool, seen_s: float) -> None:
    """Against the same step alone on the card: 1.6 s (135M, 512 samples of 316 tokens, one H200)."""
    card, work = card_machine("NVIDIA H200"), Work(512, 53, 263, 512)
    trainer, server = TrainerSetup(shape("0.5")), ServerSetup(shape("0.5"))
    alone = step_forecast(trainer, server, Layout(4), work, card).train_s
    beside = step_forecast(trainer, server, Layout(4, on_card=4, shared=True, mps=mps), work, card).train_s
    assert beside / alone == pytest.approx(seen_s / 1.6, rel=0.05)


@pytest.mark.parametrize(
    ("size", "prompt", "output", "computed", "step_s", "server_tokens_s"),
    [
        ("135m", 53, 255, None, 2.06, 63_400),
        ("135m", 53, 247, None, 2.13, 59_300),
        ("135m", 138, 9, None, 0.37, None),
        ("135m", 138, 9, 6.7, 0.227, None),
        ("1.5b", 53, 511, None, 11.4, 23_000),
        ("1.5b", 20, 511, None, 10.7, 24_500),
    ],
)
def test_four_servers_and_a_compiled_trainer_on_one_card(
    size: str, prompt: float, output: float, computed: float | None, step_s: float, server_tokens_s: float | None
) -> None:
    """Means of runs of 512 samples a step on one H200, in flight, with MPS: within 20 %. None: the servers waited, so
    their rate was not seen."""
    hidden, inner, layers, heads, kv_heads, vocabulary, pack = {
        "135m": (576, 1536, 30, 9, 3, 49152, 32768),
        "1.5b": (1536, 8960, 28, 12, 2, 151936, 16384),
    }[size]
    found = shape_of(
        {
            **{"model_type": "qwen2", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
            **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary},
            **{"tie_word_embeddings": True},
        }
    )
    assert found is not None
    trainer = TrainerSetup(found, pack_tokens=pack, checkpointing=False, chunk_tokens=4096, longest=1024)
    layout = Layout(4, on_card=4, shared=True, mps=True)
    work = Work(512, prompt, output, 512, computed)
    step = step_forecast(trainer, ServerSetup(found, max_sequences=512), layout, work, card_machine("NVIDIA H200"))
    assert step.step_s == pytest.approx(step_s, rel=0.2)
    assert server_tokens_s is None or step.server_tokens_s == pytest.approx(server_tokens_s, rel=0.2)
    assert "alternate" not in step.waits
