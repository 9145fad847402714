"""The measurements of `gpu_measurements.py`, in the order of what is needed most. Pure.

Expected times are those of H100 and H200, the start of servers included; the figures are in `docs/benchmarks.md`.
"""

from __future__ import annotations

from dataclasses import replace

import gpu_measurements_one_card as one_card
from gpu_measurements_commands import LEARNED, REHEARSAL_LIMIT_S, TESTS, guessing_run
from gpu_measurements_plan import Measurement


def measurements(device: str = "cuda", small_cards: bool = False, gpus: int = 2) -> tuple[Measurement, ...]:
    """All of them. On `cpu` the same commands as a rehearsal: tiny models and sizes, tests that are skipped.

    Args:
        small_cards: the trainer's share has to fit on a card with 80 GB.
        gpus: how many are there; with one, what was made for one comes first, and else last.
    """
    first, second = _learning(device, small_cards)
    tests = _tests()
    several = (
        *(first, *tests, *_levers(device), *_adapters(device), second),
        *(*_memory(device), *_four_cards(device)),
    )
    learning, own_tests, servers = one_card.learning(device, small_cards), one_card.tests(), one_card.servers(device)
    if gpus == 1:
        listed = (*learning, *own_tests, *tests, *servers, *(one for one in several if one not in tests))
    else:
        listed = (*several, *learning, *own_tests, *servers)
    return listed if device == "cuda" else tuple(replace(one, limit_s=REHEARSAL_LIMIT_S + 60) for one in listed)


def _learning(device: str, small_cards: bool) -> tuple[Measurement, ...]:
    """Runs that end when held-out success is 0.6 twice in succession; the time ends them, not the number of steps."""
    memory = ("finetune.seq_length=16384",) if small_cards else ()

    def run(name: str, what: str, expected_s: float, *own: str) -> Measurement:
        # 600 s of training, and the start.
        words = guessing_run(device, *memory, *own)
        return Measurement(name, "guessing", what, 2, expected_s, 720, "run", words, until=LEARNED)

    return (
        run("guessing-seed-1", "guessing_2gpu as shipped, to held-out success 0.6", 330),
        run("guessing-seed-2", "the same with seed 2 and groups of 16", 320, "seed=2", "attempts=16"),
    )


def _tests() -> tuple[Measurement, ...]:
    """GPU tests give no times, so that several may share cards; but for the one that looks how busy its card is."""
    colocated, trainer = "tests/gpu/test_colocated_gpu.py", "tests/gpu/test_trainer_gpu.py"
    one = ("tests/gpu/test_reference_gpu.py", "tests/gpu/test_varlen_gpu.py", "tests/gpu/test_tf32_gpu.py")
    idle = "leaves_its_gpu_idle"

    def test(name: str, what: str, gpus: int, expected_s: float, *words: str, alone: bool = False) -> Measurement:
        return Measurement(name, "tests", what, gpus, expected_s, 480, "tests", (*TESTS, *words), alone)

    return (
        test(
            "test-parallel-server", "a TP=2 server in turns with two ranks", 2, 220, colocated, "-k", "parallel_server"
        ),
        test("test-server-beside-rank", "a server on the card of a rank", 2, 220, colocated, "-k", "beside"),
        test(
            "test-trainer", "gradients on two cards: plain, FSDP2, ZeRO-2, ZeRO-3", 2, 180, trainer, "-k", f"not {idle}"
        ),
        test("test-one-card", "reference model, attention, TF32", 1, 120, *one),
        test(
            "test-adapter",
            "a server computes with the adapter it was sent",
            2,
            200,
            *("tests/gpu/test_adapter_update_gpu.py", "-k", "not trainers_card"),
        ),
        test("test-idle-rank", "a rank that waits leaves its card idle", 2, 30, trainer, "-k", idle, alone=True),
    )


def _levers(device: str) -> tuple[Measurement, ...]:
    """The schedule in flight at high variance of output length, with what may make its server faster."""
    words = _schedule_words(device, "pipeline", steps=32, samples_per_step=256, max_lag=1024)

    def lever(name: str, what: str, *own: str) -> Measurement:
        return Measurement(name, "levers", what, 2, 170, 300, "schedules", (*words, *own))

    return (
        lever("lever-none", "in flight at high variance, as it is"),
        lever(
            "lever-piecewise", "the same; CUDA graphs of steps that mix prompts with decoding", "--graphs", "piecewise"
        ),
    )


def _adapters(device: str) -> tuple[Measurement, ...]:
    """LoRA: updates that send merged matrices, and the adapter alone. The servers have CUDA graphs, as users' have."""

    def one(name: str, sync: str) -> Measurement:
        lora = ("--graphs", "--", "use_deepspeed=false", "finetune.lora.enabled=true", f"finetune.lora.sync={sync}")
        return _split(device, 2, name, "adapters", "1server-1rank", "1.5", 150, *lora)

    return one("adapter-merged-1.5b", "merged"), one("adapter-alone-1.5b", "adapter")


def _memory(device: str) -> tuple[Measurement, ...]:
    """What fp32 master weights take."""
    return (
        _split(device, 2, "memory-plain-0.5b", "memory", "1server-1rank", "0.5", 110),
        _split(device, 2, "memory-fsdp-0.5b", "memory", "1server-2ranks-fsdp-shared", "0.5", 120),
    )


def _four_cards(device: str) -> tuple[Measurement, ...]:
    """Updates to several servers, turns on four cards, and the schedules on them."""
    split = "world.actor_gpus=[[0],[1]]", "world.finetune_gpus=[2,3]"

    def schedule(name: str) -> Measurement:
        what = f"`{name}` at high variance, 2 servers and 2 ranks"
        words = _schedule_words(device, name, steps=24, samples_per_step=512, max_lag=2048)
        command = (*words, "--", *split, "use_deepspeed=false")
        return Measurement(f"schedule-{name}", "schedules", what, 4, 170, 330, "schedules", command)

    return (
        _split(device, 4, "update-3servers-0.5b", "updates", "3servers-1rank", "0.5", 120),
        _split(device, 4, "update-tp2-0.5b", "updates", "tp2-2ranks-zero3", "0.5", 140, "--mean-tokens", "32"),
        _split(device, 4, "update-2servers-0.5b", "updates", "2servers-2ranks-zero3", "0.5", 120),
        _split(
            *(device, 4, "colocated-4ranks-0.5b", "colocated", "2xtp2-4ranks-colocated-zero3", "0.5", 180),
            *("--mean-tokens", "32"),
        ),
        schedule("pipeline"),
        schedule("conventional"),
        _split(device, 4, "update-3servers-1.5b", "updates", "3servers-1rank", "1.5", 140),
        _split(device, 4, "update-tp2-1.5b", "updates", "tp2-2ranks-zero3", "1.5", 170, "--mean-tokens", "32"),
        schedule("concurrent"),
        _split(device, 4, "update-2servers-1.5b", "updates", "2servers-2ranks-zero3", "1.5", 140),
    )


def _schedule_words(device: str, schedule: str, steps: int, samples_per_step: int, max_lag: int) -> tuple[str, ...]:
    """One schedule at high variance of output length, with the sizes of `docs/benchmarks.md`; on a CPU tiny ones."""
    on_gpu = ("--steps", str(steps), "--samples-per-step", str(samples_per_step), "--max-lag", str(max_lag))
    on_gpu += ("--steps-per-generation", "4", "--mean-tokens", "128", "--concurrency", "256", "--timeout-s", "300")
    on_gpu += ("--learning-rate", "2e-5", "--evaluate-every", "2", "--success", "0.8", "--model", "{model}")
    on_cpu = ("--steps", "2", "--samples-per-step", "8", "--max-lag", "16", "--steps-per-generation", "2")
    on_cpu += (
        "--mean-tokens",
        "8",
        "--concurrency",
        "8",
        "--timeout-s",
        f"{REHEARSAL_LIMIT_S}",
        "--test-samples",
        "4",
    )
    return (
        *("{python}", "scripts/benchmark_schedules.py", "--device", device, "--variances", "high"),
        *("--schedules", schedule, "--keep", "{work}/runs", "--output", "{work}/result.json"),
        *(on_gpu if device == "cuda" else on_cpu),
    )


def _split(
    device: str, gpus: int, name: str, group: str, split: str, size: str, expected_s: float, *own: str
) -> Measurement:
    """One of the splits of `benchmark_splits.py` with a random model of `size` billion weights."""
    timeout_s = 2 * expected_s if device == "cuda" else REHEARSAL_LIMIT_S
    words = ("{python}", "scripts/benchmark_splits.py", "--device", device, "--gpus", str(gpus), "--splits", split)
    words += ("--size", size, "--steps", "8") if device == "cuda" else ("--steps", "2", "--samples-per-step", "8")
    words += ("--timeout-s", f"{timeout_s:g}", "--keep", "{work}/runs", "--output", "{work}/result.json", *own)
    what = f"{split}, {size} B at random: update times, rates, memory"
    return Measurement(name, group, what, gpus, expected_s, timeout_s + 75, "splits", words)
