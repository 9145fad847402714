"""The GPU tests and the measurements of docs/benchmarks.md, side by side where they fit on the GPUs.

    python scripts/gpu.py --model SmolLM2-135M-Instruct --out results/gpu                            # print the list
    python scripts/gpu.py --model SmolLM2-135M-Instruct --out results/gpu tests-1 gsm8k-1 sums-in-flight-1

The number at the end of a name is how many GPUs it needs. Each measurement has its GPUs and an equal share of the cores
to itself, and starts as soon as enough GPUs are free. `OUT/NAME.log` is its output, `OUT/table.md` has a row for each
that has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from benchmark_common import REPOSITORY, child_environ, visible_gpus

SEEDS = (1, 2, 3)
_END_S = 60.0
_EXAMPLES = """[
  {task: "Tom has 3 pens. Tom gets 4 more pens. How many pens does Tom have now?", answer: "3 + 4 = 7. \\boxed{7}"},
  {task: "Amy buys 2 boxes with 5 toys in each. How many toys does Amy have?", answer: "2 * 5 = 10. \\boxed{10}"},
  {task: "Bob has 9 eggs. Bob loses 6 of the eggs. How many eggs does Bob have?", answer: "9 - 6 = 3. \\boxed{3}"}]"""


@dataclass(frozen=True)
class Measurement:
    """Commands that run one after the other until one fails; the first words of a command follow `python`."""

    name: str
    commands: tuple[tuple[str, ...], ...]

    @property
    def num_gpus(self) -> int:
        return int(self.name.rpartition("-")[2])


def measurements(model: str, out: Path) -> dict[str, Measurement]:
    """Every measurement by name. Results go to `out`, one file or folder with the name of the measurement each."""
    found: dict[str, Measurement] = {}

    def add(name: str, *commands: str) -> None:
        found[name] = Measurement(name, tuple(tuple(shlex.split(command)) for command in commands))

    def launch(name: str, config: str, *words: str) -> str:
        return shlex.join(["-m", "pipelinerl.launch", "--config-name", config, f"output_dir={out / name}", *words])

    here = shlex.quote(str(out))
    runs = "scripts/benchmark_runs.py"
    load = "--device cuda --samples-per-step 256 --mean-tokens 128 --concurrency 256"
    league = f"scripts/league.py --model {shlex.quote(model)}"
    turns = "world.placement=colocated schedule=conventional max_lag=null"
    lora = "finetune.lora.enabled=true finetune.gradient_checkpointing=true"
    for count in (1, 2):
        add(f"tests-{count}", f"-m pytest -v -rA --junitxml {here}/tests-{count}.xml tests/gpu")
        add(f"league-{count}", f"{league} --seeds 1 --out {here}/league-{count}")
    add("ours-1", f"{league} --systems ours --out {here}/ours-1")
    # Shorter packs than those of the smallest model leave room for several servers.
    large = f"{league} --size 1.5 --tasks stories --seeds 1 --steps 5"
    add("league-1.5b-1", f"{large} --out {here}/league-1.5b-1 -- finetune.seq_length=16384")
    sums = f"{league} --systems ours --tasks sums"
    add("sums-in-flight-1", f"{sums} --out {here}/sums-in-flight-1")
    add("sums-in-turns-1", f"{sums} --out {here}/sums-in-turns-1 -- {turns}")
    server = f"--device cuda --model {shlex.quote(model)} --graphs decode --concurrency 256"
    add("server-1", f"scripts/benchmark_server.py {server} --output {here}/server-1.json")
    sizes = "--device cuda --size 0.5 --pack-tokens 4096 16384"
    add("trainer-1", f"scripts/benchmark_trainer.py {sizes} --output {here}/trainer-1.json")
    add("update-1", f"{runs} splits {load} --only one-card --size 1.5 --checkpointing --output {here}/update-1.json")
    large = f"--only one-card --size 7 --steps 4 --output {here}/large-1.json -- {lora}"
    add("large-1", f"{runs} splits --device cuda --samples-per-step 64 --mean-tokens 128 --concurrency 64 {large}")
    words = [
        f"model_path={model}",
        f"train_dataset_names=[{out}/words/train.jsonl]",
        f"test_dataset_names=[{out}/words/test.jsonl]",
        f"eval=[{{name: {out}/words/test.jsonl, k: 4, problems: 256}}]",
        f"actor.examples={' '.join(_EXAMPLES.split())}",
        "llm.parameters.max_tokens=256",
        "finetune.learning_rate=2e-5",
        "finetune.gradient_checkpointing=false",
        "finetune.max_train_steps=450",
    ]
    add("gsm8k-1", f"scripts/word_problems.py {here}/words", launch("gsm8k-1", "gsm8k", *words))
    for seed in SEEDS:
        for task, config in (("guessing", "guessing_2gpu"), ("sums", "arithmetic_2gpu")):
            name = f"{task}-seed{seed}-2"
            add(name, launch(name, config, f"seed={seed}", f"model_path={model}"))
    for servers in (1, 4):
        name = f"schedules-{servers}servers-2"
        one = f"{league} --systems ours --tasks sums --servers-per-gpu {servers}"
        add(
            name,
            *(
                f"{one} --seeds {seed} --out {here}/{name}/{schedule}-{seed} -- {words}"
                for seed in SEEDS
                for schedule, words in SCHEDULES.items()
            ),
        )
    for size in ("0.5", "1.5"):
        split = f"--only 1server-1rank --size {size} --checkpointing"
        add(f"update-{size}b-2", f"{runs} splits {load} {split} --output {here}/update-{size}b-2.json")
    for count, variants in SPLITS.items():
        names = " ".join(variants)
        add(f"splits-{count}", f"{runs} splits {load} --only {names} --size 0.5 --output {here}/splits-{count}.json")
    return found


SCHEDULES = {
    "pipeline": "schedule=pipeline",
    "concurrent": "schedule=concurrent",
    "conventional": "schedule=conventional steps_per_generation=1 max_lag=null",
}
SPLITS = {
    2: ("1server-1rank", "1server-2ranks-zero3", "1server-2ranks-fsdp", "tp2-2ranks-colocated-zero3"),
    4: ("3servers-1rank", "2servers-2ranks-zero3", "tp2-2ranks-zero3", "2xtp2-4ranks-colocated-zero3"),
}


class Machine:
    """The GPUs of this machine, as places among those that we see, and the cores that go with each."""

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self._free = list(range(num_gpus))
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, count: int) -> Any:
        """Wait for `count` free GPUs and yield their places."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield taken
        finally:
            async with self._changed:
                self._free = sorted([*self._free, *taken])
                self._changed.notify_all()

    def cores(self, places: Sequence[int]) -> set[int]:
        known = sorted(os.sched_getaffinity(0))
        return {core for place in places for core in known[place :: self.num_gpus]} or set(known)


async def run_all(chosen: Sequence[Measurement], out: Path, machine: Machine, timeout_s: float) -> bool:
    """Run all, those that need fewer GPUs first; return whether every one succeeded."""
    rows: list[str] = []
    tasks = [
        asyncio.create_task(_run(measurement, out, machine, timeout_s, rows))
        for measurement in sorted(chosen, key=lambda one: one.num_gpus)
    ]
    return all([await task for task in tasks])


async def _run(measurement: Measurement, out: Path, machine: Machine, timeout_s: float, rows: list[str]) -> bool:
    async with machine.take(measurement.num_gpus) as places:
        begun = time.monotonic()
        visible = visible_gpus(",".join(map(str, places)), os.environ.get("CUDA_VISIBLE_DEVICES"))
        environ = {**child_environ(), "CUDA_VISIBLE_DEVICES": visible}
        print(f"{measurement.name}: on GPU {visible}", flush=True)
        code = 0
        with (out / f"{measurement.name}.log").open("wb") as log:
            for command in measurement.commands:
                left_s = timeout_s - (time.monotonic() - begun)
                code = code or await _run_command(command, environ, machine.cores(places), log, left_s)
        seconds = time.monotonic() - begun
    try:
        result = "; ".join(results(measurement.name, out))
    except (ValueError, KeyError, TypeError, StopIteration, ElementTree.ParseError) as error:
        result = f"figures that cannot be read: {error!r}"
    result = result or f"see {measurement.name}.log"
    ended = "" if code == 0 else f"✗ exit status {code}; "
    rows.append(f"| {measurement.name} | {seconds:.0f} | {ended}{result} |")
    (out / "table.md").write_text("\n".join(["| measurement | seconds | result |", "|---|---|---|", *rows]) + "\n")
    print(rows[-1], flush=True)
    return code == 0


async def _run_command(
    command: Sequence[str], environ: dict[str, str], cores: set[int], log: Any, left_s: float
) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        cwd=REPOSITORY,
        env=environ,
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        # What it starts inherits the cores.
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    try:
        return await asyncio.wait_for(process.wait(), left_s)
    except (TimeoutError, asyncio.CancelledError):
        # Its launcher too, which saves its state and stops its servers.
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_S)
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def results(name: str, out: Path) -> Iterator[str]:
    """The figures that a measurement left in `out`, as text."""
    if (tests := out / f"{name}.xml").exists():
        suite = next(ElementTree.parse(tests).iter("testsuite")).attrib
        yield ", ".join(f"{suite[key]} {key}" for key in ("tests", "failures", "errors", "skipped"))
    if (figures := out / f"{name}.json").exists():
        for variant, row in json.loads(figures.read_text()).get("results", {}).items():
            yield f"{variant}: {', '.join([*row.get('errors', []), *_medians(row)])}"
    if (summary := out / name / "summary.json").exists():
        known = json.loads(summary.read_text())
        yield ", ".join(f"{key} {_number(known[key])}" for key in SUMMARY_FIGURES if key in known)
    for league in sorted((out / name).glob("**/league.json")):
        variant = league.parent.name if league.parent != out / name else ""
        for run in json.loads(league.read_text())["runs"]:
            told = run.get("error") or ", ".join(f"{key} {_number(run[key])}" for key in LEAGUE_FIGURES)
            yield f"{variant or run['system']} {run['task']} seed {run['seed']}: {told}"


def _medians(row: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Medians of the figures in `row` and in what it contains."""
    for key, value in row.items():
        if isinstance(value, dict) and "median" not in value:
            yield from _medians(value, f"{within}{key}: ")
        elif isinstance(value, dict) and key in FIGURES:
            yield f"{within}{key} {_number(value['median'])}"


FIGURES = (
    *("tokens/s", "samples_per_s", "step_s", "paused_ms", "stall_fraction", "lag_mean_versions"),
    *("trainer_peak_gib", "seconds"),
)
SUMMARY_FIGURES = (
    *("success_before", "success_after", "samples_per_second", "mean_lag_versions", "multi_version_samples"),
    *("stall_fraction", "seconds"),
)
LEAGUE_FIGURES = ("samples_per_s", "seconds_to_success", "output_tokens_per_s", "lag", "multi_version_percent")


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a small chat model, such as SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--timeout-s", type=float, default=3600, help="of each measurement")
    parser.add_argument("names", nargs="*", help="of measurements; none: print the list")
    args = parser.parse_args()
    out = args.out.absolute()
    model = str(Path(args.model).absolute()) if Path(args.model).is_dir() else args.model
    known = measurements(model, out)
    if unknown := [name for name in args.names if name not in known]:
        parser.exit(2, f"error: unknown measurement {', '.join(unknown)}, expected names among {', '.join(known)}\n")
    if not args.names:
        for name, measurement in known.items():
            print(f"{name}: {' && '.join(shlex.join(['python', *command]) for command in measurement.commands)}")
        return
    machine = Machine(torch.cuda.device_count())
    if large := [name for name in args.names if known[name].num_gpus > machine.num_gpus]:
        parser.exit(2, f"error: {', '.join(large)}: more GPUs than the {machine.num_gpus} of this machine\n")
    out.mkdir(parents=True, exist_ok=True)
    sys.exit(not asyncio.run(run_all([known[name] for name in args.names], out, machine, args.timeout_s)))


if __name__ == "__main__":
    main()
