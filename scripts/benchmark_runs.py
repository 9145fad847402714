"""Whole runs of one task that differ in a few settings, next to each other: rates, idle time, lag, update times.

    python scripts/benchmark_runs.py schedules                                     # CPU, a tiny random model
    python scripts/benchmark_runs.py schedules --device cuda --model MODEL --repeats 3 -- finetune.learning_rate=1e-5
    python scripts/benchmark_runs.py splits --device cuda --only one-card --size 1.5 --samples-per-step 256
    python scripts/benchmark_runs.py own --variant "small: finetune.seq_length=4096" "large: finetune.seq_length=16384"

`schedules` compares when to sample and when to train, `splits` ways to share GPUs, `own` any overrides. Repeats are the
outer loop, so that noise on the machine hits all variants alike; each figure is the median with its range. Words after
`--` are overrides of every run. A run that fails or exceeds `--timeout-s` has its last error in the table. The JSON
file is rewritten after every run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmark_common import SHAPES, child_environ, graphs_override, make_parser, random_model, spread, write_result

from pipelinerl.tiny.build import build_tiny_model
from pipelinerl.weights.sync import PHASES

TASK = "benchmark_task"
CONFIG = f"""
defaults:
  - quickstart
  - _self_
dataset_loader: {TASK}.load_problems
dataset_loader_params: null
train_dataset_names: [train]
test_dataset_names: [test]
actor:
  rollout_policy: {TASK}.generate_rollout
attempts: 4
finetune:
  train_batch_size: 1
  lr_scheduler_type: constant
  num_warmup_steps: 0
  save_checkpoint_steps: 100000
  save_final_training_state: false
wandb:
  mode: disabled
"""
#: How long a run may take to end after SIGTERM before it is killed.
_END_S = 45.0


def schedules(args: argparse.Namespace) -> dict[str, list[str]]:
    """The three schedules, with answers of equal length and of very uneven length."""
    own = {
        "conventional": ["schedule=conventional", f"steps_per_generation={args.steps_per_generation}", "max_lag=null"],
        "concurrent": ["schedule=concurrent", f"max_lag={args.max_lag}"],
        "pipeline": ["schedule=pipeline", f"max_lag={args.max_lag}"],
    }
    return {
        f"{name}-{variance}": [*words, f"+custom.variance={variance}"]
        for variance in ("low", "high")
        for name, words in own.items()
    }


def splits(args: argparse.Namespace) -> dict[str, list[str]]:
    """Ways to share the GPUs of one host. Servers and ranks may share a GPU; `colocated` ones alternate."""
    stage2, stage3 = _deepspeed(2, args.device), _deepspeed(3, args.device)
    plain, fsdp = ["backend=plain"], ["backend=fsdp"]
    lag = f"max_lag={args.max_lag}"
    tp2 = "vllm_config.vllm_kwargs.tensor-parallel-size=2"
    colocated = ["world.placement=colocated", "schedule=conventional", "steps_per_generation=1", "max_lag=null"]
    reference = ["finetune.rl.kl_coef=0.01"]

    def on(servers: str, ranks: str, *words: str) -> list[str]:
        return [f"world.actor_gpus={servers}", f"world.finetune_gpus={ranks}", *words]

    found = {
        # one GPU
        "one-card": on("[[0]]", "[0]", *plain, lag),
        "one-card-colocated": on("[[0]]", "[0]", *plain, *colocated),
        # two GPUs
        "1server-1rank": on("[[0]]", "[1]", *plain, lag),
        "2servers-1rank": on("[[0],[0]]", "[1]", *plain, lag),
        "1server-1reference-1rank": on("[[0]]", "[1]", *plain, lag, "world.preprocessor_gpus=[[0]]", *reference),
        "1server-2ranks-zero2": on("[[0]]", "[0,1]", *stage2, lag),
        "1server-2ranks-zero3": on("[[0]]", "[0,1]", *stage3, lag),
        "1server-2ranks-fsdp": on("[[0]]", "[0,1]", *fsdp, lag),
        "tp2-2ranks-colocated-zero3": on("[[0,1]]", "[0,1]", *stage3, *colocated, tp2),
        # four GPUs
        "3servers-1rank": on("[[0],[1],[2]]", "[3]", *plain, lag),
        "2servers-2ranks-zero3": on("[[0],[1]]", "[2,3]", *stage3, lag),
        "2servers-2ranks-fsdp": on("[[0],[1]]", "[2,3]", *fsdp, lag),
        "tp2-2ranks-zero3": on("[[0,1]]", "[2,3]", *stage3, lag, tp2),
        "2xtp2-4ranks-colocated-zero3": on("[[0,1],[2,3]]", "[0,1,2,3]", *stage3, *colocated, tp2),
        # eight GPUs
        "4servers-4ranks-zero3": on("[[0],[1],[2],[3]]", "[4,5,6,7]", *stage3, lag),
    }
    return {name: [*words, f"+custom.variance={args.variance}"] for name, words in found.items()}


def own(args: argparse.Namespace) -> dict[str, list[str]]:
    """Variants from the command line: `name: override override`."""
    pairs = (text.partition(":") for text in args.variant)
    return {name.strip(): [*words.split(), f"+custom.variance={args.variance}"] for name, _, words in pairs}


SETS = {"schedules": schedules, "splits": splits, "own": own}


def _deepspeed(stage: int, device: str) -> list[str]:
    precision = "fp32" if device == "cpu" else "bf16"
    return ["backend=deepspeed", f"backend.config=deepspeed_stage{stage}_{precision}"]


def shared_words(args: argparse.Namespace, seed: int) -> list[str]:
    """Overrides that all variants have."""
    longest = 6 * args.mean_tokens
    on_gpu = [
        "vllm_config.vllm_kwargs.dtype=bfloat16",
        f"vllm_config.vllm_kwargs.gpu-memory-utilization={args.free_share}",
        f"+vllm_config.vllm_kwargs.kv-cache-memory-bytes={round(args.kv_gib * 2**30)}",
        "~vllm_config.vllm_kwargs.enforce-eager",
        graphs_override(args.graphs),
        "finetune.dtype=auto",
        "finetune.logprob_chunk_tokens=4096",
        f"finetune.gradient_checkpointing={str(args.checkpointing).lower()}",
    ]
    return [
        f"seed={seed}",
        f"world.device={args.device}",
        f"finetune.max_train_steps={args.steps}",
        f"finetune.gradient_accumulation_passes={args.samples_per_step}",
        f"finetune.learning_rate={args.learning_rate}",
        f"finetune.seq_length={max(2048 if args.device == 'cpu' else 16384, 2 * longest)}",
        f"vllm_config.start_timeout_s={args.timeout_s}",
        f"vllm_config.vllm_kwargs.max_model_len={longest + 128}",
        f"vllm_config.vllm_kwargs.max-num-seqs={args.concurrency}",
        f"actor.llm_max_rollouts={args.concurrency}",
        f"actor.test_samples={args.test_samples}",
        f"eval_every_n_versions={args.evaluate_every}",
        f"llm.parameters.max_tokens={longest}",
        f"+custom.mean_tokens={args.mean_tokens}",
        *(on_gpu if args.device == "cuda" else []),
    ]


def run_bounded(
    command: Sequence[str], folder: Path, output: Path, timeout_s: float, environ: Mapping[str, str]
) -> tuple[int, bool]:
    """Run `command` in `folder`; return its exit code and whether its time was over."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=environ)
    try:
        return process.wait(timeout_s), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(_END_S), True
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, True
    finally:
        process.kill()  # its children notice and end too
        process.wait()


def run_once(args: argparse.Namespace, folder: Path, model: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run one variant in a new folder and return its figures, or `{"error": ...}`."""
    task, run_dir, output = folder / "task", folder / "run", folder / "launch.txt"
    task.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name(f"{TASK}.py"), task)
    (task / "benchmark.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-dir", str(task), "--config-name", "benchmark"]
    command += [f"output_dir={run_dir}", f"model_path={model}", *words]
    code, late = run_bounded(command, task, output, args.timeout_s, child_environ())
    if code or late:
        return {"error": ("late: " if late else "") + last_line(run_dir, output)}
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return figures(summary, rows, args.concurrency, args.success)


def last_line(run_dir: Path, output: Path) -> str:
    """Why a run failed: the reason in its summary, else the last line with `error`, else the last line."""
    try:
        reason = json.loads((run_dir / "summary.json").read_text()).get("reason")
    except (OSError, json.JSONDecodeError):
        reason = None
    if reason:
        return " ".join(str(reason).split())
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return ([line for line in lines if "error" in line.lower()] or lines or ["no output"])[-1]


def figures(
    summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], concurrency: int, success: float
) -> dict[str, float | None]:
    """Figures of one run. Rates leave out the first step, update times the update of version 0.

    `server_load` is the mean share of `concurrency` rollouts on each server, `server_idle_s` the seconds without any,
    summed over servers. `seconds_to_success` counts from the first weights; None: not reached.
    """
    steps = [row for row in rows if "finetune/step_s" in row]
    steady = steps[1:] or steps
    updates = [row for row in rows if row["source"] == "weight_update"]
    later = [row for row in updates if row.get("step", 0) > 0] or updates
    begin = min((row["time"] for row in updates), default=0.0)
    reached = [
        row["time"] - begin
        for row in rows
        if row["source"] == "evaluation" and row.get("evaluation/test/success_rate", 0.0) >= success
    ]

    def total(name: str) -> float:
        return sum(float(row.get(name, 0.0)) for row in steady)

    step_s = total("finetune/step_s")
    load, server_idle_s = occupancy(rows, begin, concurrency)
    phases = {f"{name}_ms": _median_ms(later, name) for name in PHASES}
    paused = [1000 * sum(float(row.get(f"weight_update/{name}_s", 0.0)) for name in PHASES) for row in later]
    return {
        "samples_per_s": total("finetune/samples") / step_s if step_s else None,
        "trainer_tokens_per_s": total("finetune/tokens") / step_s if step_s else None,
        "output_tokens_per_s": summary["output_tokens_per_second"],
        "step_s": statistics.median([row["finetune/step_s"] for row in steady]) if steady else None,
        "trainer_busy": total("finetune/train_s") / step_s if step_s else None,
        "wait_data_s": total("finetune/wait_data_s"),
        "server_load": load,
        "server_idle_s": server_idle_s,
        **phases,
        "paused_ms": statistics.median(paused) if paused else None,
        "stall_fraction": summary["stall_fraction"],
        "lag_mean_versions": summary["mean_lag_versions"],
        "lag_max_versions": summary["max_lag_versions"],
        "multi_version_samples": summary["multi_version_samples"],
        "logprob_abs_diff_mean": summary["logprob_abs_diff_mean"],
        "trainer_peak_gib": max((row.get("finetune/gpu_memory_peak_gib", 0.0) for row in rows), default=0.0),
        "seconds": summary["seconds"],
        "seconds_to_success": min(reached, default=None),
        "success_after": summary["success_after"],
    }


def _median_ms(rows: Sequence[Mapping[str, Any]], phase: str) -> float | None:
    known = [1000 * float(row[key]) for row in rows if (key := f"weight_update/{phase}_s") in row]
    return statistics.median(known) if known else None


def occupancy(rows: Sequence[Mapping[str, Any]], begin: float, concurrency: int) -> tuple[float, float]:
    """Return (share of `concurrency` rollouts per server, idle seconds summed over servers) since time `begin`."""
    since, window_s, rollout_s, idle_s = begin, 0.0, 0.0, 0.0
    for row in rows:
        loads = {name: value for name, value in row.items() if name.startswith("actor/server_load_")}
        if not loads or row["time"] <= since:
            continue
        seconds, since = row["time"] - since, row["time"]
        for name, value in loads.items():
            window_s += seconds
            rollout_s += value * seconds
            # The first window begins before the first weights.
            idle_s += min(row[name.replace("load", "idle_s")], seconds)
    return (rollout_s / window_s / concurrency if window_s else 0.0), idle_s


def over_repeats(runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`spread` of each figure over the repeats that worked, and the errors of the others."""
    runs = list(runs)
    errors = [run["error"] for run in runs if "error" in run]
    good = [run for run in runs if "error" not in run]
    table: dict[str, Any] = {"errors": errors} if errors else {}
    return table | {name: spread(run[name] for run in good) for name in (good[0] if good else ())}


def model_of(args: argparse.Namespace, scratch: Path) -> Path:
    """The model to train: a folder or name that was given, a random one of `--size`, or a tiny one."""
    if args.model:
        return Path(args.model).absolute() if Path(args.model).is_dir() else Path(args.model)
    if args.size:
        return random_model(args.size, scratch / "model", torch.bfloat16 if args.device == "cuda" else torch.float32)
    return build_tiny_model(scratch / "model", seed=3, warmup=None, progress=lambda line: None)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("set", choices=sorted(SETS))
    parser.add_argument("--only", nargs="*", help="names of variants; default: all of the set")
    parser.add_argument("--variant", nargs="*", default=[], help="for `own`: 'name: override override ...'")
    parser.add_argument("--list", action="store_true", help="print the variants and their overrides")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs", default="decode", help="CUDA graphs of the servers: decode or piecewise")
    parser.add_argument("--model", help="a model folder or name")
    parser.add_argument("--size", choices=sorted(SHAPES), help="a random model with this many billion weights")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--samples-per-step", type=int, default=64)
    parser.add_argument("--steps-per-generation", type=int, default=4)
    parser.add_argument("--max-lag", type=int, default=128, help="samples")
    parser.add_argument("--mean-tokens", type=int, default=32)
    parser.add_argument("--variance", choices=("low", "high"), default="high", help="of answer lengths")
    parser.add_argument("--concurrency", type=int, default=32, help="rollouts per server")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--evaluate-every", type=int, default=0, help="versions; 0: before and after training")
    parser.add_argument("--test-samples", type=int, default=16)
    parser.add_argument("--success", type=float, default=0.9, help="held-out success to time")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="key-value cache of each server on a GPU")
    parser.add_argument("--free-share", type=float, default=0.3, help="of a GPU, free when a server starts")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, on GPUs")
    parser.add_argument("--timeout-s", type=float, default=900, help="of each run, its start included")
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args(argv)


def main() -> None:
    args = arguments()
    known = SETS[args.set](args)
    if args.list:
        sys.stdout.writelines(f"{name}: {' '.join(words)}\n" for name, words in known.items())
        return
    names = args.only or list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only: got {', '.join(unknown)}, expected names among {', '.join(known)}")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "keep")}
    with tempfile.TemporaryDirectory(prefix="benchmark-runs-") as folder:
        scratch = Path(folder) if args.keep is None else args.keep.absolute()
        model = model_of(args, scratch)
        for repeat in range(args.repeats):
            for name in names:
                words = [*shared_words(args, seed=repeat + 1), *known[name], *args.overrides]
                runs[name].append(run_once(args, scratch / f"{name}-{repeat}", model, words))
                results = {key: over_repeats(done) for key, done in runs.items() if done}
                write_result(args.output, {"settings": settings, "results": results})
    sys.exit(any("error" in run for done in runs.values() for run in done))


if __name__ == "__main__":
    main()
