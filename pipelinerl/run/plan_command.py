"""`python -m pipelinerl plan`: memory and speed of a run on this machine or another, without starting it.

Writes nothing, and loads neither torch nor vLLM. `--from RUN_DIR` compares the forecast with what a run recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipelinerl.commands import typed
from pipelinerl.config import RunConfig
from pipelinerl.config.compose import compose
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError
from pipelinerl.run.fit import (
    RunForecast,
    better_split,
    faults_of,
    forecast_run,
    lines_of,
    machine_here,
)
from pipelinerl.run.model_folder import read_shape
from pipelinerl.run.preflight import Start, check_disk
from pipelinerl.streams.open_run import find_run
from pipelinerl.world import (
    LOOPBACK,
    Cluster,
    ClusterMember,
    ClusterNode,
    build_world_map,
    described_cluster,
    memory_of_machine,
    usable_cores,
)
from pipelinerl.world.forecast import GIB, trainer_memory
from pipelinerl.world.rates import (
    CARDS,
    Machine,
    card_kind,
    card_machine,
    cpu_machine,
    largest_micro_batch,
    micro_batches_of,
)

#: The first steps compile kernels and wait for the first samples.
_WARM_UP_STEPS = 2
#: A side that waits for more than this share of a step is worth a change.
_MUCH_WAITING = 0.3
_SPARE_MEMORY = 0.6
#: Of the step that needed the most memory: all of its tokens, and those that were computed.
_PEAK_TOKENS, _PEAK_COMPUTED = "peak_step_tokens", "peak_step_computed_tokens"


def main(argv: list[str]) -> int:
    """Print the forecast; return 0, or 2 if the run would not fit."""
    args, overrides = _parser().parse_known_args(argv)
    if args.run is not None:
        _compare(args)
        return 0
    if not any(word.startswith("output_dir=") for word in overrides):
        overrides.append("output_dir=plan")
    composed = compose(overrides)
    if composed.config is None:
        print(composed.help_text)
        return 0
    config = composed.config.of_stage()
    shape = read_shape(config.model_path)
    if shape is None:
        expected = "a model of known size: a folder with config.json, one in the hub's cache, or a name like X-7B"
        raise ConfigError("model_path", config.model_path, expected, "Download its config.json first.")
    cluster = _cluster(args, config)
    hardware = _hardware(args, machine_here(config, cluster), cluster.num_gpus > 0 and config.world.device != "cpu")
    if cluster.num_gpus:
        size = int(hardware.memory_bytes)
        cluster = replace(cluster, nodes=tuple(replace(machine, gpu_bytes=size) for machine in cluster.nodes))
    world = build_world_map(config, cluster, model=shape)
    forecast = forecast_run(config, world, hardware, shape, _tokens(args))
    notes = [f"note: {note}" for note in world.notes]
    if args.gpus and not args.cores:
        notes.append(f"note: planned with the {usable_cores()} CPU cores of this machine in each node; see --cores")
    print("\n".join([*lines_of(forecast), *notes, *check_disk(Start(config, cluster, os.environ))]))
    faults = faults_of(forecast)
    for fault in faults:
        print(f"refused: {fault}", file=sys.stderr)
    return EXIT_USER_ERROR if faults or not forecast.fits else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("plan"),
        description="Print memory of every card by part, speed, lag and disk of a run, before it is started.",
        epilog="All other words are those of launch: --config-name NAME and overrides. Exit code 2: it does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, help="GPUs of a machine, instead of those of this one; 0: none")
    parser.add_argument("--nodes", type=int, help="machines")
    parser.add_argument("--card", help=f"kind of GPU: {', '.join(CARDS)}")
    parser.add_argument("--gpu-memory-gib", type=float, help="memory of a GPU")
    parser.add_argument("--ram-gib", type=float, help="memory of a machine")
    parser.add_argument("--cores", type=int, help="CPU cores of a machine")
    parser.add_argument("--prompt-tokens", type=float, help="tokens of a prompt, on average")
    parser.add_argument("--output-tokens", type=float, help="tokens of an answer, on average")
    parser.add_argument("--from", dest="run", metavar="RUN_DIR", help="compare with what this run recorded")
    return parser


def _tokens(args: argparse.Namespace) -> tuple[float, float] | None:
    if args.output_tokens is None:
        return None
    return args.prompt_tokens or args.output_tokens / 2, args.output_tokens


def _cluster(args: argparse.Namespace, config: RunConfig) -> Cluster:
    """The cluster of the configuration or the environment, overridden by the flags."""
    named = args.gpus is not None or args.card is not None or args.gpu_memory_gib is not None
    cores = args.cores or usable_cores()
    here = None
    if not (named and args.nodes):
        machine = ClusterNode.from_env(os.environ, cores)
        here = described_cluster(config.world, machine, ClusterMember.from_env(os.environ, config.world.cluster))
    if here is not None and not named and args.nodes is None:
        return here
    count = args.gpus if args.gpus is not None else 1 if named else here.most_gpus if here else 0
    machine = ClusterNode(LOOPBACK, tuple(map(str, range(count))), cores)
    return Cluster.alike(machine, ClusterMember(args.nodes or (here.world_size if here else 1)))


def _hardware(args: argparse.Namespace, here: Machine | None, has_gpus: bool) -> Machine:
    """The machine that the flags describe, and this one for the rest.

    Raises:
        ConfigError: the kind of GPU is unknown, or not given where there is none to ask.
    """
    host = args.ram_gib * GIB if args.ram_gib else memory_of_machine()
    if not has_gpus:
        return cpu_machine(host, args.cores or usable_cores())
    if args.card is not None or args.gpu_memory_gib is not None:
        if args.card is not None and card_kind(args.card) is None:
            raise ConfigError("--card", args.card, f"one of {', '.join(CARDS)}", "Or give --gpu-memory-gib alone.")
        memory = args.gpu_memory_gib * GIB if args.gpu_memory_gib else None
        machine = card_machine(args.card or f"GPU of {args.gpu_memory_gib:g} GiB", memory)
        return replace(machine, host_bytes=host)
    if here is None or here.on_cpu:
        raise ConfigError("--card", "nothing", f"one of {', '.join(CARDS)}", "This machine has no GPU to ask.")
    return replace(here, host_bytes=host)


def recorded_steps(metrics_file: Path) -> dict[str, float]:
    """Means of the trainer's metrics after the first steps, and the largest values of memory in all steps.

    Means, because steps that wait for their batch alternate with steps that find it ready. Also `steps` (those of the
    means), `samples_per_s` and `output_tokens_per_s` (per second of these steps), and the tokens of the step with
    the largest peak of memory.

    Raises:
        ConfigError: the run has no more than the first steps.
    """
    with metrics_file.open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if "finetune/step_s" in row]
    kept = rows[_WARM_UP_STEPS:]
    if not kept:
        expected = f"a run of more than {_WARM_UP_STEPS} steps"
        raise ConfigError("--from", str(metrics_file), expected, "Let it train a little longer.")
    peak = max(rows, key=lambda row: (row.get("finetune/gpu_memory_peak_gib", 0.0), _computed(row)))
    values: dict[str, float] = {
        "steps": len(kept),
        _PEAK_TOKENS: peak.get("finetune/tokens") or 0.0,
        _PEAK_COMPUTED: _computed(peak),
    }
    for name in {name for row in kept for name, value in row.items() if isinstance(value, int | float)}:
        if "memory" in name:
            values[name] = max(row[name] for row in rows if name in row)
        else:
            values[name] = statistics.fmean(row[name] for row in kept if name in row)
    values["samples_per_s"] = values.get("finetune/samples", 0.0) / values["finetune/step_s"]
    values["output_tokens_per_s"] = values.get("finetune/output_tokens", 0.0) / values["finetune/step_s"]
    return values


def _computed(row: Mapping[str, float]) -> float:
    """Tokens that the trainer computed; runs of earlier versions computed all."""
    return row.get("finetune/computed_tokens") or row.get("finetune/tokens") or 0.0


def _compare(args: argparse.Namespace) -> None:
    """Print forecast and record of a run side by side, and suggest changes."""
    run = find_run(args.run)
    config, world = run.config, run.world
    seen = recorded_steps(run.run_dir.metrics_file)
    machine = ClusterNode.from_env(os.environ)
    cluster = Cluster.alike(machine, ClusterMember.from_env(os.environ, config.world.cluster))
    hardware = _hardware(args, machine_here(config, cluster), world.device == "cuda")
    samples = seen.get("finetune/samples") or 1.0
    output = (seen.get("finetune/output_tokens") or 0.0) / samples
    prompt = max(0.0, (seen.get("finetune/tokens") or 0.0) / samples - output)
    shape = read_shape(config.model_path) or read_shape(str(run.run_dir.current_model))
    if shape is None or not world.jobs_of("finetune"):
        raise ConfigError("--from", args.run, "a run with a trainer and a known model", "Give another run.")
    forecast = forecast_run(config, world, hardware, shape, (prompt, max(output, 1.0)), _computed(seen) / samples)
    print(
        f"{run.run_dir.root}: {seen['steps']} steps of {samples:,.0f} samples of {prompt:,.0f} + {output:,.0f} tokens"
    )
    print(f"{'':36} {'forecast':>12} {'seen':>12} {'ratio':>7}")
    for label, expected, name in _compared(forecast, seen):
        if (found := seen.get(name)) is not None:
            ratio = f"{expected / found:.2f}" if found else "-"
            print(f"{label:36} {expected:12,.2f} {found:12,.2f} {ratio:>7}")
    print("\n".join(changes(forecast, seen)))


def _compared(forecast: RunForecast, seen: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """(label, forecast, metric) of everything that can be compared. Memory is that of the step that needed the most."""
    step, trainer = forecast.step, forecast.trainer
    assert trainer is not None
    memory = trainer_memory(largest_micro_batch(trainer, seen[_PEAK_TOKENS], seen[_PEAK_COMPUTED]))
    rows = [
        ("peak of tensors, GiB", memory.tensors / GIB, "finetune/gpu_memory_peak_gib"),
        ("peak with reserve, GiB", memory.reserved / GIB, "finetune/gpu_memory_reserved_peak_gib"),
        ("peak of a rank, GiB", memory.total / GIB, "finetune/memory_peak_gib"),
    ]
    if step is not None:
        rows += [
            ("seconds a step", step.step_s, "finetune/step_s"),
            ("of these training, s", step.train_s, "finetune/train_s"),
            ("of these waiting for samples, s", step.step_s - step.train_s, "finetune/wait_data_s"),
            ("samples/s", step.samples_s, "samples_per_s"),
            ("output tokens/s", step.samples_s * forecast.work.output_tokens, "output_tokens_per_s"),
            ("lag, versions", step.lag, "finetune/lag_mean_versions"),
        ]
    return rows


def changes(forecast: RunForecast, seen: Mapping[str, float]) -> list[str]:
    """Changes that the record of a run suggests."""
    step_s, waited = seen.get("finetune/step_s") or 0.0, seen.get("finetune/wait_data_s") or 0.0
    config, lines = forecast.config, list[str]()
    room = forecast.machine.memory_bytes / GIB
    peak = seen.get("finetune/gpu_memory_reserved_peak_gib")
    if step_s and waited > _MUCH_WAITING * step_s:
        more = (
            "more servers, or more cards for them (world.num_actor_llms), or more rollouts at once "
            "(actor.llm_max_rollouts)"
        )
        if forecast.step is not None and forecast.step.needs_workers:
            more = "more processes that run rollouts (actor.rollout_workers)"
        lines.append(f"change: the trainer waited {waited / step_s:.0%} of each step: {more}")
    elif step_s and waited < 0.05 * step_s:
        lag = seen.get("finetune/lag_mean_versions")
        lines.append("change: the trainer never waited: more cards for it (world.num_finetune_ranks)")
        if lag is not None and lag > 1.5:
            lines.append(f"change: samples are {lag:.1f} versions old, yet the trainer never waits: lower max_lag")
    if peak is not None and peak < _SPARE_MEMORY * room:
        tuned, trainer = config.finetune, forecast.trainer
        assert trainer is not None
        if tuned.gradient_checkpointing:
            total = trainer_memory(replace(trainer, checkpointing=False)).total
            if total < 0.95 * room * GIB:
                lines.append(
                    f"change: finetune.gradient_checkpointing=false fits ({total / GIB:.1f} of {room:.1f} GiB) and "
                    "saves a quarter of the trainer's time"
                )
        longer = 2 * tuned.seq_length
        total = trainer_memory(replace(trainer, pack_tokens=longer)).total
        fits = total < 0.9 * room * GIB
        if tuned.seq_packing and fits and micro_batches_of(trainer, forecast.work) > 1:
            lines.append(
                f"change: finetune.seq_length={longer} fits ({total / GIB:.1f} of {room:.1f} GiB): fewer, larger packs"
            )
    if (better := better_split(forecast)) is not None:
        lines.append(f"change: {better}")
    return lines or ["nothing to change: neither side waits much and the memory is used"]
