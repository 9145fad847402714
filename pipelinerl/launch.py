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
from pipelinerl.run.follower import follow
from pipelinerl.run.leader import gathered_nodes
from pipelinerl.run.nodes import Plan
from pipelinerl.run.preflight import Start, check_dry_run, check_start
from pipelinerl.run.processes import Event, Outcome, signals_as_events
from pipelinerl.run.restart import can_resume
from pipelinerl.run.session import supervise
from pipelinerl.run.show import plan_of, print_plan
from pipelinerl.run.start import build_commands, enter
from pipelinerl.run.watch import RunSession
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.open_run import bounded_by_record
from pipelinerl.world import Cluster, FreePorts, build_world_map, nvml_gpu_lister, usable_cores

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launcher and return its exit code."""
    try:
        composed = compose(sys.argv[1:] if argv is None else argv)
        if composed.config is None:
            sys.stdout.write(f"{composed.help_text}\n")
            return 0
        # For the user's classes that live in this process (`tracking.sinks`); last, so that they hide nothing.
        sys.path += [str(folder) for folder in composed.search_dirs]
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
    checked = check_dry_run(Start(config, cluster, os.environ, composed.search_dirs, is_dry_run=True))
    with FreePorts(config, cluster.rank, reserve=False) as ports:
        world = build_world_map(config, cluster, ports)
    commands = build_commands(world, RunDir(Path(config.output_dir).absolute()), os.environ, composed.search_dirs)
    print_plan(plan_of(config, world, commands, composed.notes))
    sys.stdout.flush()
    _say(checked)
    return 0


def launch(composed: ComposedConfig, config: RunConfig, cluster: Cluster) -> int:
    """Start the run and, as often as `supervise.max_restarts` allows, resume it when a process of it died."""
    restarts: list[str] = []
    while True:
        outcome = launch_once(composed, config, cluster, restarts)
        if not can_resume(outcome) or len(restarts) >= config.supervise.max_restarts:
            return outcome.exit_code
        if outcome.signum is not None:
            _say(f"{signal.Signals(outcome.signum).name} came while the run failed: it is not restarted")
            return outcome.exit_code
        restarts.append(str(outcome.reason).partition("\n")[0])
        text = f"the run is resumed (restart {len(restarts)} of {config.supervise.max_restarts})"
        _say(text)
        logger.warning("%s, after: %s", text, outcome.reason)
        # The run that is there now is the one to continue.
        config = config.model_copy(update={"force_restart": False})


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
    events: SimpleQueue[Event] = SimpleQueue()
    with gathered_nodes(config, cluster) as nodes, FreePorts(config, cluster.rank, nodes.busy_ports) as ports:
        world = build_world_map(config, cluster, ports)
        with signals_as_events(events) as signals, enter(config) as entered:
            lines += [f"changed since the last start: {change}" for change in entered.changes]
            if entered.changes and entered.moved_to is not None:
                lines.append("the last start trained no step, so this is a new run")
            _say(*lines, *(f"note: {note}" for note in composed.notes))
            run_dir, identity = entered.run_dir, entered.identity
            # The launcher's own log goes to a file; the terminal belongs to the table.
            logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=run_dir.launch_log)
            save_config(config, run_dir.config_file)
            run_dir.world_file.write_text(world.to_json(), encoding="utf-8")
            commands = build_commands(world, run_dir, os.environ, composed.search_dirs)
            # A token of the user's own lets servers join that somebody else starts (`pool add`).
            token = os.environ.get(TOKEN_KEY) or secrets.token_urlsafe(24)
            peers = nodes.send_plan(Plan(str(run_dir.root), identity.run_id, identity.incarnation, token), events)
            session = RunSession(config, world, run_dir, identity, commands, os.environ, token, events, tuple(restarts))
            outcome = supervise(session, peers, entered.moved_to)
            peers.end(outcome)
    return replace(outcome, signum=signals[0]) if signals else outcome


def _say(*lines: str) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
