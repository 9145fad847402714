"""What the launcher prints: the plan of a run (`dry_run=true`), and the result of a run or an evaluation."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelinerl.commands import typed
from pipelinerl.config import RunConfig
from pipelinerl.records import EvaluationResult
from pipelinerl.run.processes import Outcome
from pipelinerl.run.start import Command
from pipelinerl.rundir.layout import RunDir, newest_training_state
from pipelinerl.world import WorldMap

_ROWS = (
    ("success before training", "success_before", "{:.3f}"),
    ("success after training", "success_after", "{:.3f}"),
    ("optimizer steps", "steps", "{}"),
    ("weight updates", "weight_updates", "{}"),
    ("samples trained", "samples_trained", "{}"),
    ("seconds", "seconds", "{:.0f}"),
    ("samples per second", "samples_per_second", "{:.1f}"),
    ("mean lag (versions)", "mean_lag_versions", "{:.2f}"),
)


def print_plan(config: RunConfig, world: WorldMap, commands: Sequence[Command], notes: Sequence[str] = ()) -> None:
    """Print what would be started where. Wide enough that no command is cut when stdout is not a terminal."""
    parts = [
        Text(f"Plan of the run in {config.output_dir} (nothing is started or written)", style="bold"),
        Text(
            f"model {config.model_path}, device {world.device}, {world.world_size} node(s), "
            f"{len(world.jobs_of('actor_llm'))} actor server(s), {len(world.jobs_of('preprocessor_llm'))} reference "
            f"server(s), {world.num_finetune_ranks} trainer rank(s)"
        ),
        Text(
            f"{config.finetune.samples_per_step} samples per step, {config.attempts} attempts per problem, "
            f"at most {config.finetune.max_train_steps} steps, max_lag {config.max_lag}"
        ),
        Text(_schedule_text(config, world)),
        *(Text(f"note: {note}") for note in [*notes, *world.notes]),
        _jobs_table(world),
        Text("Commands", style="bold"),
    ]
    parts += [_command_text(command) for command in commands]
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=200, no_color=True, highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text), markup=False)


def _schedule_text(config: RunConfig, world: WorldMap) -> str:
    """How generation and training share time and devices."""
    steps = f" ({config.steps_per_generation} steps per generation)" if config.schedule == "conventional" else ""
    transports = ", ".join(dict.fromkeys(world.transport_to(job) for job in world.jobs_of("actor_llm"))) or "none"
    text = f"schedule {config.schedule}{steps}, weights by {transports}"
    colocated = config.world.colocated
    if colocated is None:
        return text
    turns = "pause" if world.device == "cpu" else f"sleep (level {colocated.sleep_level})"
    return f"{text}, colocated: servers {turns} while the trainer trains"


def _jobs_table(world: WorldMap) -> Table:
    table = Table()
    headings = ["job", "node", "host", "GPUs" if world.device == "cuda" else "cores", "port", "weights port"]
    has_caches = any(job.cache_bytes is not None for job in world.jobs)
    for heading in [*headings, *(["cache"] if has_caches else [])]:
        table.add_column(heading, no_wrap=True)
    for job in world.jobs:
        devices = (",".join(job.gpus) or "-") if world.device == "cuda" else str(job.cores)
        port, group_port = (str(number) if number else "-" for number in (job.port, job.weight_group_port))
        cache = "-" if job.cache_bytes is None else f"{job.cache_bytes / 2**30:.1f} GiB"
        row = (job.name, str(job.node_rank), job.host, devices, port, group_port)
        table.add_row(*row, *([cache] if has_caches else []))
    return table


def _command_text(command: Command) -> Text:
    env = " ".join(f"{key}={shlex.quote(value)}" for key, value in command.env.items())
    text = Text(f"{command.job.name}: ", style="bold")
    return text.append(f"{env} {shlex.join(command.argv)}", style="not bold")


def print_result(outcome: Outcome, summary: Mapping[str, Any], run_dir: RunDir) -> None:
    """Table and paths to stdout; the reason of a failure, and how to continue, to stderr. A run without a finished step
    has no numbers to show."""
    console = Console(highlight=False, soft_wrap=True)
    has_results = bool(summary.get("steps") or summary.get("success_before") is not None)
    if has_results:
        table = Table(show_header=False)
        for label, key, pattern in _ROWS:
            if summary.get(key) is not None:
                table.add_row(label, pattern.format(summary[key]))
        console.print(table)
    for label, path in (
        ("summary", run_dir.summary_file),
        ("learning curve", run_dir.learning_curve_file),
        ("metrics", run_dir.metrics_file),
        ("model", run_dir.current_model),
        (_about_best(summary), run_dir.best_model),
    ):
        if path.exists() and (has_results or path != run_dir.learning_curve_file):
            console.print(f"{label}: {path}", markup=False)
    if outcome.status == "completed":
        console.print("training is complete", markup=False)
    _print_end(outcome, "run", _how_to_continue(run_dir))


def _print_end(outcome: Outcome, what: str, how_to_continue: str) -> None:
    sys.stdout.flush()
    if outcome.status == "interrupted":
        sys.stderr.write(f"the {what} was interrupted: {outcome.reason}\n{how_to_continue}\n")
    elif outcome.status == "failed":
        sys.stderr.write(f"error: the {what} failed: {outcome.reason}\n")


def _about_best(summary: Mapping[str, Any]) -> str:
    best = summary.get("best_model")
    if not best:
        return "best model"
    last = best["max_version"]
    span = "" if last == best["version"] else f" measured over versions {best['version']} to {last}"
    return f"best model (version {best['version']}, {best['metric']} {best['value']:g}{span})"


def _how_to_continue(run_dir: RunDir) -> str:
    step = newest_training_state(run_dir)
    if step is None:
        return "The same command starts again at the first step: no training state was saved yet."
    return f"The same command, without force_restart, continues after step {step}, the newest training state."


def evaluation_report(config: RunConfig, results: Sequence[EvaluationResult]) -> dict[str, Any]:
    """Content of `evaluation.json`: the model, how it was sampled, and the results of `debug.mode=evaluation`."""
    plain = {"names": config.plain_test_names, "parameters": config.test_llm.parameters.model_dump()}
    own = [
        {"names": [each.name], "parameters": each.parameters(config.test_llm.parameters).model_dump()}
        for each in config.eval
    ]
    return {
        "model": config.model_path,
        "sampling": [each for each in (plain, *own) if each["names"]],
        "results": msgspec.to_builtins(results),
    }


def print_evaluation(outcome: Outcome, results: Sequence[EvaluationResult], run_dir: RunDir) -> None:
    """Table and paths to stdout; the reason of a failure, and how to continue, to stderr."""
    console = Console(highlight=False, soft_wrap=True)
    if results:
        table = Table()
        for column in ("set", "problems", "k", "estimate", "value", "95 %", "tokens", "cut", "failed"):
            is_text = column in ("set", "estimate")
            table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "set")
        for result in results:
            for row in _evaluation_rows(result):
                table.add_row(*row)
        console.print(table)
        console.print(f"results: {run_dir.evaluation_file}", markup=False)
    console.print(f"rollouts: {typed('samples')} {run_dir.root}", markup=False)
    _print_end(outcome, "evaluation", "The same command continues; finished rollouts are kept.")


def _evaluation_rows(result: EvaluationResult) -> Iterator[tuple[str, ...]]:
    """One row per estimate; shared columns only in the first."""
    first = (result.dataset_name, str(result.num_problems), str(result.attempts))
    cut = "" if result.cut_fraction is None else f"{result.cut_fraction:.3f}"
    rest = ("" if result.output_tokens is None else f"{result.output_tokens:.1f}", cut, str(result.num_failed))
    for name, found in result.estimates.items():
        interval = f"{found.low:.3f}-{found.high:.3f}"
        yield (*first, name.replace("_at_", "@"), f"{found.value:.3f}", interval, *rest)
        first, rest = ("", "", ""), ("", "", "")
    if not result.estimates:
        yield (*first, "", "", "", *rest)
