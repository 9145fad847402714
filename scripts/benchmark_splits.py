"""Whole runs on different splits of one host's GPUs: update times, rates, idle time and memory of each.

    python scripts/benchmark_splits.py --device cpu --gpus 2 --output results/splits.json     # a rehearsal, tiny model
    python scripts/benchmark_splits.py --gpus 2 --model MODEL --steps 8 --parallel 4 --output results/splits2.json
    python scripts/benchmark_splits.py --gpus 4 --size 7 --output results/splits4.json

`--list` prints the splits. Each is a run of its own of `benchmark_schedules_task`, and takes at most `--timeout-s`; one
that fails or is late says so in its row, with its last error, and the next one starts. The file is written after each.
With `--parallel N` that many run at once on the same cards: start-up takes most of a short run. Their memory adds up,
and so do their times; figures that matter are taken one after the other. `nvidia-smi` is asked for memory and idle time
where it is there. A server with two workers needs a model with an even number of heads: `--size 0.5`, 1.5 or 7, not
SmolLM2-135M. Words behind `--` are overrides of every run's configuration.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from benchmark_common import REPOSITORY, SHAPES, graphs_override, random_model, write_result
from benchmark_runs import last_line, run_bounded, summary_of
from benchmark_schedules import CONFIG, TASK
from benchmark_splits_figures import (
    SPLIT_KEY,
    GPUSampler,
    begin_of_training,
    figures,
    markdown,
    parameters_of,
    rows_of,
)
from benchmark_splits_list import SPLITS, Split, chosen, words_of

from pipelinerl.tiny.build import build_tiny_model


def overrides_of(args: argparse.Namespace, split: Split) -> list[str]:
    """The words of one run; what only `split` has comes from `words_of`."""
    on_gpu = [
        "vllm_config.vllm_kwargs.dtype=bfloat16",
        # What has to be free when a server starts; its cache has a fixed size.
        f"vllm_config.vllm_kwargs.gpu-memory-utilization={args.free_share}",
        "finetune.dtype=auto",
        "finetune.load_as_bf16=true",
        "finetune.logprob_chunk_tokens=4096",
        f"finetune.gradient_checkpointing={str(args.checkpointing).lower()}",
    ]
    graphs = [
        "~vllm_config.vllm_kwargs.enforce-eager",
        graphs_override(),
    ]
    longest = 6 * args.mean_tokens
    return [
        f"finetune.max_train_steps={args.steps}",
        f"finetune.gradient_accumulation_passes={args.samples_per_step}",
        f"finetune.learning_rate={args.learning_rate}",
        f"finetune.seq_length={max(2048, 2 * longest)}",
        "finetune.save_final_training_state=false",
        f"vllm_config.vllm_kwargs.max_model_len={longest + 128}",
        f"vllm_config.vllm_kwargs.max-num-seqs={args.concurrency}",
        f"vllm_config.start_timeout_s={args.timeout_s}",
        f"actor.llm_max_rollouts={args.concurrency}",
        f"actor.test_samples={args.test_samples}",
        "eval_every_n_versions=0",
        f"llm.parameters.max_tokens={longest}",
        f"+custom.mean_tokens={args.mean_tokens}",
        f"+custom.variance={args.variance}",
        *(on_gpu if args.device == "cuda" else []),
        *(graphs if args.graphs else []),
        *words_of(split, args.device, args.max_lag, args.kv_gib),
        *args.overrides,
    ]


def run_split(args: argparse.Namespace, split: Split, folder: Path, model: Path) -> dict[str, Any]:
    """One run in a new folder; its row. Whatever goes wrong with the run is in the row."""
    task, run_dir = folder / "task", folder / "run"
    task.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name(f"{TASK}.py"), task)
    (task / "splits.yaml").write_text(CONFIG)
    words = overrides_of(args, split)
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-dir", str(task), "--config-name", "splits"]
    command += [f"output_dir={run_dir}", f"model_path={model}", *words]
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # vLLM's all-reduce over symmetric memory needs NVLink multicast, which hosts that others use as well turn off.
    multicast = {"VLLM_ALLREDUCE_USE_SYMM_MEM": os.environ.get("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")}
    environ = {SPLIT_KEY: split.name, "PYTHONPATH": paths, **multicast}
    started = time.time()
    with GPUSampler(split.name) as sampler:
        code, late = run_bounded(command, task, folder / "launch.txt", args.timeout_s, environ)
    rows = rows_of(run_dir)
    settings = {
        "bytes_per_weight": 2.0 if args.device == "cuda" else 4.0,
        "peak_tflops": args.peak_tflops if args.device == "cuda" else 0.0,
    }
    begin = begin_of_training(rows)
    error = None if code == 0 else last_line(run_dir, folder / "launch.txt")
    if late:
        error = f"not done after {args.timeout_s:g} s: {error}"
    found = figures(rows, len(split.ranks), sum(map(len, split.servers)), parameters_of(model), settings)
    return {
        "split": split.name,
        "status": "late" if late else "ok" if code == 0 else "failed",
        "exit_code": code,
        "seconds": time.time() - started,
        "start_up_s": None if begin is None else begin - started,
        **found,
        "cards_peak_gib": {index: peak / 1024 for index, peak in sampler.cards.items()} or None,
        "processes_peak_gib": {name: peak / 1024 for name, peak in sorted(sampler.processes.items())} or None,
        "cards_idle_s": (sampler.idle_s(begin) if begin is not None else {}) or None,
        "summary": summary_of(run_dir),
        "error": error,
        "words": words,
    }


def run_all(args: argparse.Namespace, splits: Sequence[Split], scratch: Path, model: Path) -> list[dict[str, Any]]:
    """Rows of all splits in their order; the file at `args.output` has those that are done."""
    rows: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def one(split: Split) -> None:
        folder = scratch / split.name
        try:
            row = run_split(args, split, folder, model)
        except Exception as error:  # noqa: BLE001 - the other splits still count
            row = {"split": split.name, "status": "failed", "error": f"{type(error).__name__}: {error}"}
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        with lock:
            rows[split.name] = row
            done = [rows[split.name] for split in splits if split.name in rows]
            settings = {key: value for key, value in vars(args).items() if key not in ("output", "keep")}
            write_result(args.output, {"settings": settings, "splits": done})

    with ThreadPoolExecutor(args.parallel) as pool:
        for future in as_completed([pool.submit(one, split) for split in splits]):
            future.result()
    return [rows[split.name] for split in splits]


def model_of(args: argparse.Namespace, scratch: Path) -> Path:
    """The folder of the model to train, or the name that was given."""
    if args.model:
        folder = Path(args.model)
        return folder.absolute() if folder.is_dir() else folder
    if args.size:
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        return random_model(args.size, scratch / "model", dtype)
    return build_tiny_model(scratch / "model", seed=3, warmup=None, progress=lambda line: None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=sorted(SPLITS), default=2, help="GPUs of the host")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--splits", nargs="*", help="names, see --list; default: those of a host with so many GPUs")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--model", help="a folder or a name; default: --size, else a tiny random one")
    parser.add_argument("--size", choices=sorted(SHAPES), help="a random model of so many billion weights")
    parser.add_argument("--parallel", type=int, default=1, help="splits that run at the same time")
    parser.add_argument("--timeout-s", type=float, default=300, help="of each split, its start included")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples-per-step", type=int, default=64)
    parser.add_argument("--max-lag", type=int, default=128, help="samples; where servers and ranks do not take turns")
    parser.add_argument("--mean-tokens", type=int, default=64)
    parser.add_argument("--variance", choices=("low", "high"), default="high")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--test-samples", type=int, default=8)
    parser.add_argument("--kv-gib", type=float, default=2.0, help="cache of each server on a GPU")
    parser.add_argument("--free-share", type=float, default=0.1, help="of a GPU, what is free when a server starts")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, on GPUs")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs in the servers: quicker, and later up")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of a card (H100, H200)")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    try:
        chosen(args.gpus, args.splits)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    if args.list:
        for size, known in SPLITS.items():
            print(f"--gpus {size}:", *(f"  {split}" for split in known), sep="\n")
        return
    splits = chosen(args.gpus, args.splits)
    with tempfile.TemporaryDirectory(prefix="benchmark-splits-") as name:
        scratch = Path(name) if args.keep is None else args.keep.absolute()
        rows = run_all(args, splits, scratch, model_of(args, scratch))
    print(markdown(rows))
    sys.exit(0 if all(row["status"] == "ok" for row in rows) else 1)


if __name__ == "__main__":
    main()
