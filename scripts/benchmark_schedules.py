"""The three schedules beside each other: whole runs of one task with everything else the same.

    python scripts/benchmark_schedules.py --output results/schedules.json              # CPU, a tiny random model
    python scripts/benchmark_schedules.py --device cuda --model MODEL --repeats 3 -- finetune.learning_rate=1e-5
    python scripts/benchmark_schedules.py --device cuda --model MODEL --graphs piecewise

Each schedule runs with answers of one length (low variance) and with one in ten eleven times as long (high variance).
For each it reports samples per second, how busy trainer and servers were and the seconds in which they were not, lag,
effective sample size, and the seconds to a held-out success; every figure is the median, with the range over the
repeats. Words behind `--` are overrides of every run's configuration. `conventional` has samples_per_step *
steps_per_generation samples a generation. A run that fails, or is not done after `--timeout-s`, says why under
`failed`, and the next one starts. The file is written after each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmark_common import GRAPHS, graphs_override, write_result
from benchmark_runs import last_line, run_bounded

from pipelinerl.tiny.build import build_tiny_model

SCHEDULES = ("conventional", "concurrent", "pipeline")
TASK = "benchmark_schedules_task"
CONFIG = """
defaults:
  - quickstart
  - _self_
dataset_loader: benchmark_schedules_task.load_problems
dataset_loader_params: null
train_dataset_names: [train]
test_dataset_names: [test]
actor:
  rollout_policy: benchmark_schedules_task.generate_rollout
attempts: 4
finetune:
  train_batch_size: 1
  lr_scheduler_type: constant
  num_warmup_steps: 0
  save_checkpoint_steps: 100000
wandb:
  mode: disabled
"""


def overrides_of(args: argparse.Namespace, schedule: str, variance: str, seed: int) -> list[str]:
    """The words of one run; only the schedule's own differ between schedules."""
    longest = 6 * args.mean_tokens
    own = {
        "conventional": [f"steps_per_generation={args.steps_per_generation}", "max_lag=null"],
        "concurrent": [f"max_lag={args.max_lag}"],
        "pipeline": [f"max_lag={args.max_lag}"],
    }
    on_gpu = [
        "vllm_config.vllm_kwargs.dtype=bfloat16",
        "vllm_config.vllm_kwargs.gpu-memory-utilization=0.5",
        "~vllm_config.vllm_kwargs.enforce-eager",
        graphs_override(args.graphs),
        "+vllm_config.vllm_kwargs.kv-cache-memory-bytes=8589934592",
        "finetune.dtype=bf16",
        "finetune.logprob_chunk_tokens=4096",
        "finetune.seq_length=16384",
    ]
    return [
        f"schedule={schedule}",
        *own[schedule],
        f"seed={seed}",
        f"world.device={args.device}",
        f"finetune.max_train_steps={args.steps}",
        f"finetune.gradient_accumulation_passes={args.samples_per_step}",
        f"finetune.learning_rate={args.learning_rate}",
        f"finetune.seq_length={max(2048, 2 * longest)}",
        f"vllm_config.vllm_kwargs.max_model_len={longest + 128}",
        f"vllm_config.vllm_kwargs.max-num-seqs={args.concurrency}",
        f"actor.llm_max_rollouts={args.concurrency}",
        f"actor.test_samples={args.test_samples}",
        f"eval_every_n_versions={args.evaluate_every}",
        f"llm.parameters.max_tokens={longest}",
        f"+custom.mean_tokens={args.mean_tokens}",
        f"+custom.variance={variance}",
        *(on_gpu if args.device == "cuda" else []),
        *args.overrides,
    ]


def run_once(args: argparse.Namespace, folder: Path, model: str, words: Sequence[str]) -> dict[str, Any]:
    """One run in a new folder; what it measured.

    Raises:
        RuntimeError: it failed, or was not done in time; says why in one line.
    """
    task = folder / "task"
    task.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name(f"{TASK}.py"), task)
    (task / "schedules.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-dir", str(task), "--config-name", "schedules"]
    command += [f"output_dir={folder / 'run'}", f"model_path={model}", *words]
    output = folder / "launch.txt"
    code, late = run_bounded(command, task, output, args.timeout_s, {})
    if late or code:
        why = f"not done after {args.timeout_s:g} s: " if late else ""
        raise RuntimeError(why + last_line(folder / "run", output))
    summary = json.loads((folder / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return figures(summary, rows, args.concurrency, args.success)


def figures(
    summary: dict[str, Any], rows: Sequence[dict[str, Any]], concurrency: int, success: float
) -> dict[str, float | None]:
    """The figures of one run. `seconds_to_success` counts from the first weights; None: it was not reached.

    `server_load` is the mean share of `concurrency` rollouts that ran on each server, `server_idle_s` the seconds
    in which none ran, summed over the servers; `idle_gpu_s` adds those in which the trainer waited for samples.
    """

    def column(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    begin = min((row["time"] for row in rows if row["source"] == "weight_update"), default=0.0)
    reached = [
        row["time"] - begin
        for row in rows
        if row["source"] == "evaluation" and row.get("evaluation/test/success_rate", 0.0) >= success
    ]
    steps_s = sum(column("finetune/step_s"))
    load, server_idle_s = occupancy(rows, begin, concurrency)
    trainer_idle_s = sum(column("finetune/idle_s"))
    trainer_busy = sum(column("finetune/train_s")) / steps_s if steps_s else 0.0
    return {
        "samples_per_s": summary["samples_per_second"],
        "output_tokens_per_s": summary["output_tokens_per_second"],
        "seconds": summary["seconds"],
        "trainer_busy": trainer_busy,
        "trainer_idle_s": trainer_idle_s,
        "server_load": load,
        "server_idle_s": server_idle_s,
        "idle_gpu_s": trainer_idle_s + server_idle_s,
        "stall_fraction": summary["stall_fraction"],
        "lag_mean_versions": summary["mean_lag_versions"],
        "lag_max_versions": summary["max_lag_versions"],
        "ess": statistics.fmean(column("finetune/ess") or [0.0]),
        "multi_version_samples": summary["multi_version_samples"],
        "seconds_to_success": min(reached, default=None),
        "success_after": summary["success_after"],
    }


def occupancy(rows: Sequence[dict[str, Any]], begin: float, concurrency: int) -> tuple[float, float]:
    """(share of `concurrency` rollouts on a server, seconds without any on it summed over servers) since `begin`."""
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


def spread(runs: Iterable[dict[str, float | None]]) -> dict[str, Any]:
    """Median, range and values of each figure over the repeats."""
    table: dict[str, Any] = {}
    runs = list(runs)
    for name in runs[0]:
        values = [run[name] for run in runs]
        known = [value for value in values if value is not None]
        table[name] = {
            "median": statistics.median(known) if known else None,
            "range": [min(known), max(known)] if known else None,
            "values": values,
        }
    return table


def run_all(args: argparse.Namespace, scratch: Path, model: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The tables of all runs by variance and schedule; the file at `args.output` has those that are done."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "keep")}
    for variance in args.variances:
        runs: dict[str, list[dict[str, float | None]]] = {schedule: [] for schedule in args.schedules}
        failed: dict[str, list[str]] = {schedule: [] for schedule in args.schedules}
        # Repeats outside: what the machine does meanwhile hits all schedules alike.
        for repeat in range(args.repeats):
            for schedule in args.schedules:
                words = overrides_of(args, schedule, variance, seed=repeat + 1)
                try:
                    runs[schedule].append(run_once(args, scratch / f"{variance}-{schedule}-{repeat}", model, words))
                except RuntimeError as error:
                    failed[schedule].append(f"seed {repeat + 1}: {error}")
                results[variance] = {
                    key: (spread(runs[key]) if runs[key] else {}) | ({"failed": failed[key]} if failed[key] else {})
                    for key in args.schedules
                    if runs[key] or failed[key]
                }
                write_result(args.output, {"settings": settings, "results": results})
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs", choices=sorted(GRAPHS), default="decode", help="which CUDA graphs of servers")
    parser.add_argument("--model", help="a model folder or name; default: a tiny random one")
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--variances", nargs="*", choices=("low", "high"), default=["low", "high"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--samples-per-step", type=int, default=64)
    parser.add_argument("--steps-per-generation", type=int, default=4)
    parser.add_argument("--max-lag", type=int, default=128, help="samples; of concurrent and pipeline")
    parser.add_argument("--mean-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--evaluate-every", type=int, default=4, help="versions between evaluations")
    parser.add_argument("--test-samples", type=int, default=64)
    parser.add_argument("--success", type=float, default=0.9, help="held-out success whose time is reported")
    parser.add_argument("--timeout-s", type=float, default=3600, help="of each run, its start included")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="benchmark-schedules-") as name:
        scratch = Path(name) if args.keep is None else args.keep.absolute()
        model = args.model or str(build_tiny_model(scratch / "model", seed=3, warmup=None, progress=lambda line: None))
        results = run_all(args, scratch, model)
    sys.exit(any(table.get("failed") for tables in results.values() for table in tables.values()))


if __name__ == "__main__":
    main()
