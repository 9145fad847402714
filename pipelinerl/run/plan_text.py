"""The plan of a run as text for people: jobs, nodes, devices, ports and commands (`dry_run=true`)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipelinerl.config import RunConfig
from pipelinerl.run.start import Command
from pipelinerl.world import WorldMap


def plan_of(config: RunConfig, world: WorldMap, commands: Sequence[Command], notes: Sequence[str] = ()) -> Group:
    """What would be started where."""
    parts: list[RenderableType] = [
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
        *(Text(f"note: {note}") for note in notes),
        _jobs_table(world),
        Text("Commands", style="bold"),
    ]
    parts += [_command_text(command) for command in commands]
    return Group(*parts)


def _schedule_text(config: RunConfig, world: WorldMap) -> str:
    """How generation and training share time and devices."""
    steps = f" ({config.steps_per_generation} steps per generation)" if config.schedule == "conventional" else ""
    transports = ", ".join(dict.fromkeys(world.transport_to(job) for job in world.jobs_of("actor_llm"))) or "none"
    text = f"schedule {config.schedule}{steps}, weights by {transports}"
    if config.world.placement != "colocated":
        return text
    turns = "pause" if world.device == "cpu" else f"sleep (level {config.world.sleep_level})"
    return f"{text}, colocated: servers {turns} while the trainer trains"


def print_plan(plan: Group) -> None:
    """Print to stdout; wide enough that no command is cut when the output is not a terminal."""
    console = Console(soft_wrap=True)
    console.print(plan if console.is_terminal else _as_text(plan), markup=False, highlight=False)


def _as_text(plan: Group) -> str:
    recorder = Console(width=200, no_color=True)
    with recorder.capture() as captured:
        for part in plan.renderables:
            recorder.print(part, soft_wrap=isinstance(part, Text), markup=False, highlight=False)
    return captured.get().rstrip("\n")


def _jobs_table(world: WorldMap) -> Table:
    table = Table(title=None)
    for heading in ("job", "node", "host", "GPUs" if world.device == "cuda" else "cores", "port", "weights port"):
        table.add_column(heading, no_wrap=True)
    for job in world.jobs:
        devices = (",".join(job.gpus) or "-") if world.device == "cuda" else str(job.cores)
        port, group_port = (str(number) if number else "-" for number in (job.port, job.weight_group_port))
        table.add_row(job.name, str(job.node_rank), job.host, devices, port, group_port)
    return table


def _command_text(command: Command) -> Text:
    env = " ".join(f"{key}={shlex.quote(value)}" for key, value in command.env.items())
    text = Text(f"{command.job.name}: ", style="bold")
    return text.append(f"{env} {shlex.join(command.argv)}", style="not bold")
