"""Main of the orchestrator: `python -m pipelinerl.launch [--config-name NAME] [key=value ...]`.

Composes and checks the configuration, plans the run, and supervises its processes until training is complete. Exit
codes: 0 training is complete, 1 the run failed, 2 the user has to change something, 128 + n stopped by signal n.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from pipelinerl.config import RunConfig
from pipelinerl.config.compose import ComposedConfig, compose
from pipelinerl.config.load import save_config
from pipelinerl.config.stages import stage_config
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, PipelineRLError, UserError
from pipelinerl.role import LOG_FORMAT, TOKEN_KEY
from pipelinerl.run.node_following import follow
from pipelinerl.run.node_leading import OtherNodes, other_nodes
from pipelinerl.run.node_messages import Plan
from pipelinerl.run.ports import FreePorts, chosen_port_keys, default_lock_dir
from pipelinerl.run.preflight import Start, check_dry_run, check_start
from pipelinerl.run.processes import Event, signals_as_events
from pipelinerl.run.recorded_streams import bounded_by_record
from pipelinerl.run.restarts import can_resume
from pipelinerl.run.session import RunSession, supervise
from pipelinerl.run.start import EnteredRun, build_commands, enter
from pipelinerl.run.supervisor import Outcome
from pipelinerl.rundir.layout import RunDir
from pipelinerl.world import Cluster, WorldMap, build_world_map, nvml_gpu_lister, usable_cores

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launcher and return its exit code."""
    try:
        composed = compose(sys.argv[1:] if argv is None else argv)
        if composed.config is None:
            sys.stdout.write(f"{composed.help_text}\n")
            return 0
        cluster = Cluster.from_env(os.environ, nvml_gpu_lister, usable_cores())
        config = stage_config(composed.config)
        if config.dry_run:
            return show_plan(composed, config, cluster)
        if cluster.rank > 0:
            return follow(config, cluster, composed.search_dirs)
        return launch(composed, config, cluster)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except PipelineRLError as error:  # raised before anything was started
        sys.stderr.write(f"error: {error}\n")
        return EXIT_RUN_FAILED
    except KeyboardInterrupt as error:
        sys.stderr.write("interrupted before anything was started\n")
        signum: int = error.args[0] if error.args else signal.SIGINT  # Python's own has none
        return 128 + signum


def show_plan(composed: ComposedConfig, config: RunConfig, cluster: Cluster) -> int:
    """Print what `launch` would start, and on stderr what can be said about such a start without one."""
    from pipelinerl.run.plan_text import plan_of, print_plan

    checked = check_dry_run(Start(config, cluster, os.environ, composed.search_dirs, is_dry_run=True))
    with FreePorts(cluster.rank, chosen_port_keys(config)) as ports:
        world = build_world_map(config, cluster, ports)
    commands = build_commands(world, RunDir(Path(config.output_dir).absolute()), os.environ, composed.search_dirs)
    print_plan(plan_of(config, world, commands, composed.notes))
    sys.stdout.flush()
    sys.stderr.write(f"{checked}\n")
    return 0


def launch(composed: ComposedConfig, config: RunConfig, cluster: Cluster) -> int:
    """Start the run and, as often as `supervise.max_restarts` allows, go on with it when a process of it died."""
    restarts: list[str] = []
    while True:
        outcome = launch_once(composed, config, cluster, restarts)
        if not can_resume(outcome.status, outcome.exit_code, outcome.job):
            return outcome.exit_code
        if len(restarts) >= config.supervise.max_restarts:
            return outcome.exit_code
        if outcome.signum is not None:
            name = signal.Signals(outcome.signum).name
            sys.stderr.write(f"{name} came while the run failed: it does not go on by itself\n")
            return outcome.exit_code
        restarts.append(str(outcome.reason).partition("\n")[0])
        text = f"the run goes on by itself ({len(restarts)} of {config.supervise.max_restarts} restarts)"
        sys.stderr.write(f"{text}\n")
        logger.warning("%s, after: %s", text, outcome.reason)
        # The run that is there now is the one to continue.
        finetune = config.finetune.model_copy(update={"force_restart": False})
        config = config.model_copy(update={"force_restart": False, "finetune": finetune})


def launch_once(composed: ComposedConfig, config: RunConfig, cluster: Cluster, restarts: Sequence[str]) -> Outcome:
    """Check, plan, enter the run directory and supervise. Nothing is written before everything is checked.

    Args:
        composed: where the configuration comes from.
        config: what to run.
        cluster: where.
        restarts: why this launcher had to start the run again so far.
    """
    lines = check_start(Start(config, cluster, os.environ, composed.search_dirs))
    config = bounded_by_record(config)
    with (
        other_nodes(config, cluster) as nodes,
        FreePorts(cluster.rank, chosen_port_keys(config), default_lock_dir(), busy_elsewhere=nodes.busy_ports) as ports,
    ):
        world = build_world_map(config, cluster, ports)
        events: SimpleQueue[Event] = SimpleQueue()
        with signals_as_events(events) as signals, enter(config) as entered:
            for line in lines:
                sys.stderr.write(f"{line}\n")
            for change in entered.changes:
                sys.stderr.write(f"changed since the last start: {change}\n")
            if entered.changes and entered.moved_to is not None:
                sys.stderr.write("the last start trained no step, so this is a new run\n")
            outcome = _run(composed, config, world, entered, events, nodes, restarts)
    return replace(outcome, signum=signals[0]) if signals else outcome


def _run(
    composed: ComposedConfig,
    config: RunConfig,
    world: WorldMap,
    entered: EnteredRun,
    events: SimpleQueue[Event],
    nodes: OtherNodes,
    restarts: Sequence[str],
) -> Outcome:
    run_dir = entered.run_dir
    _log_to(run_dir.launch_log)
    save_config(config, run_dir.config_file)
    run_dir.world_file.write_text(world.to_json(), encoding="utf-8")
    for note in composed.notes:
        sys.stderr.write(f"note: {note}\n")
    session = RunSession(
        config=config,
        world=world,
        run_dir=run_dir,
        identity=entered.identity,
        commands=build_commands(world, run_dir, os.environ, composed.search_dirs),
        environ=os.environ,
        # A token of the user's own lets servers join that somebody else starts (`pool add`).
        token=os.environ.get(TOKEN_KEY) or secrets.token_urlsafe(24),
        events=events,
        restarts=tuple(restarts),
        others=nodes.launchers,
    )
    nodes.start(Plan(str(run_dir.root), entered.identity.run_id, entered.identity.incarnation, session.token), events)
    outcome = supervise(session, moved_to=entered.moved_to)
    nodes.end(outcome)
    return outcome


def _log_to(file: Path) -> None:
    """The launcher's own log goes to a file; the terminal belongs to the table."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=file)


if __name__ == "__main__":
    sys.exit(main())
