"""The measurements of `gpu_measurements.py` that need one GPU, by group. Pure. See `gpu_measurements_list`."""

from __future__ import annotations

from gpu_measurements_commands import LEARNED, TESTS, guessing_run
from gpu_measurements_plan import Measurement


def learning(device: str, small_cards: bool) -> tuple[Measurement, ...]:
    """Server and trainer at work on one card at the same time, up to four such runs beside one another.

    They share the card, so their curves count, and their seconds only for one another. Memory by `docs/benchmarks.md`:
    without checkpointing a pack takes about 1 MiB a token, behind 3 GiB for weights and optimizer. Four trainers with
    11 to 19 GiB each (25 to 26 reserved at 16,384 tokens) leave room for four servers of 4 to 6 GiB. 256 sequences of
    512 tokens, the most that a server has at once, fill a cache of 2.8 GiB.
    """
    tokens, cache_gib = (6144, 3) if small_cards else (16384, 4)
    shared = (
        *("world.actor_gpus=[[0]]", "world.finetune_gpus=[0]", f"finetune.seq_length={tokens}"),
        # What has to be free when a server starts, and what it takes.
        "vllm_config.vllm_kwargs.gpu-memory-utilization=0.1",
        f"vllm_config.vllm_kwargs.kv-cache-memory-bytes={cache_gib << 30}",
    )

    def run(name: str, what: str, *own: str) -> Measurement:
        what = f"guessing_2gpu with server and trainer on one card, in flight: {what}"
        words = guessing_run(device, *shared, *own)
        return Measurement(f"one-card-{name}", "onecard", what, 1, 550, 850, "run", words, alone=False, until=LEARNED)

    return (
        *(run(f"seed-{seed}", f"seed {seed}", f"seed={seed}") for seed in (1, 2, 3)),
        run("no-target", "seed 1, no target for the entropy", "seed=1", "finetune.rl.target_entropy=null"),
    )


def tests() -> tuple[Measurement, ...]:
    """Those of `tests/gpu` that need one card. They give no times, so several share it."""
    trainer = "tests/gpu/test_trainer_gpu.py"

    def test(name: str, what: str, expected_s: float, *words: str) -> Measurement:
        return Measurement(f"test-{name}", "tests", what, 1, expected_s, 480, "tests", (*TESTS, *words), alone=False)

    updates, turns = "tests/gpu/test_adapter_update_gpu.py", "tests/gpu/test_colocated_gpu.py"
    exact = "test_bf16_products_give_almost_the_fp32_gradient", "test_a_micro_batch_never_waits_for_the_gpu"
    return (
        test(
            "adapter-one-card",
            "a server on the trainer's card computes with the adapter",
            220,
            updates,
            *_only("trainers_card"),
        ),
        test(
            "sleep-one-card",
            "a server sleeps at levels 1 and 2, wakes and gets weights",
            220,
            turns,
            *_only("sleeps_wakes"),
        ),
        test("turns-one-card", "a run in turns on one card learns", 150, turns, *_only("a_colocated_run")),
        test("trainer-one-card", "bf16 products; no wait for the GPU", 60, *(f"{trainer}::{name}" for name in exact)),
    )


def _only(part: str) -> tuple[str, str]:
    """The tests with this part in their names."""
    return "-k", part


def servers(device: str) -> tuple[Measurement, ...]:
    """Tokens a second of one server that has the card to itself, with log-probs, as compact answers."""

    def one(name: str, what: str, expected_s: float, *own: str) -> Measurement:
        words = ("{python}", "scripts/benchmark_server.py", "--device", device, "--output", "{work}/result.json")
        words += ("--route", "lean", "--log-probs", "with", *own)
        if device == "cpu":
            words += ("--concurrency", "8", "--clients", "2", "--max-tokens", "8", "--repeats", "1")
        return Measurement(f"server-{name}", "server", what, 1, expected_s, expected_s + 180, "server", words)

    def graphs(kind: str) -> tuple[str, ...]:
        return ("--graphs", kind) if device == "cuda" else ()

    def varied(kind: str, what: str, expected_s: float) -> Measurement:
        # The prompts are token ids, of which the rehearsal's own model has too few.
        model = ("--model", "{model}") if device == "cuda" else ("--random-model", "0.001")
        load = (*model, "--lengths", "varied", "--turns", "12", "--max-tokens", "64", "--repeats", "2")
        return one(f"varied-{kind}", f"answers of varied length; {what}", expected_s, *graphs(kind), *load)

    size = "1.5" if device == "cuda" else "0.001"
    adapter = (*graphs("decode"), "--random-model", size, "--adapter-rank", "0", "16")
    return (
        one("adapter", f"with a LoRA adapter of rank 16 and without, {size} B at random", 220, *adapter),
        varied("decode", "CUDA graphs of steps that decode", 260),
        varied("piecewise", "CUDA graphs of mixed steps too", 280),
    )
