"""Main of the orchestrator: `python -m pipelinerl.launch [--config-name NAME] [key=value ...]`.

Composes and checks the configuration, plans the run, and supervises its processes until training is complete. Exit
codes: 0 training is complete, 1 the run failed, 2 the user has to change something, 128 + n stopped by signal n.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.config.compose import ComposedConfig, Member, compose
from pipelinerl.config.load import load_config, save_config
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, PipelineRLError, UserError
from pipelinerl.role import LOG_FORMAT, TOKEN_KEY
from pipelinerl.run.join import gathered_nodes, join, say
from pipelinerl.run.model_folder import read_shape
from pipelinerl.run.nodes import Hello, NodeLink, Peers, Plan, node_secret
from pipelinerl.run.preflight import Start, check_dry_run, check_node, check_start
from pipelinerl.run.processes import Event, Interrupted, Outcome, signals_as_events
from pipelinerl.run.restart import can_resume
from pipelinerl.run.session import supervise, supervise_jobs
from pipelinerl.run.show import print_plan
from pipelinerl.run.start import RunSession, build_commands, enter
from pipelinerl.rundir.layout import RunDir, read_identity
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import bounded_by_record
from pipelinerl.version import __version__
from pipelinerl.world import (
    DEFAULT_MASTER_PORT,
    Cluster,
    FreePorts,
    WorldMap,
    build_world_map,
    busy_ports,
    nvml_gpu_lister,
    nvml_gpu_memory,
    usable_cores,
)

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launcher and return its exit code."""
    return start(lambda: compose(sys.argv[1:] if argv is None else argv))


def start(compose_config: Callable[[], ComposedConfig]) -> int:
    """Start what is composed, or show its plan, and return the exit code. Errors are messages."""
    try:
        composed = compose_config()
        if composed.members:
            return launch_members(composed.members)
        if composed.config is None:
            sys.stdout.write(f"{composed.help_text}\n")
            return 0
        # For the user's classes that live in this process (`tracking.sinks`); last, so that they hide nothing.
        sys.path += [str(folder) for folder in composed.search_dirs]
        cluster = Cluster.from_env(os.environ, nvml_gpu_lister, usable_cores(), nvml_gpu_memory)
        config = composed.config.of_stage()
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
        world = build_world_map(config, cluster, ports, read_shape(config.model_path))
    commands = build_commands(world, RunDir(Path(config.output_dir).absolute()), os.environ, composed.search_dirs)
    print_plan(config, world, commands, composed.notes)
    sys.stdout.flush()
    say(checked)
    return 0


def launch(composed: ComposedConfig, config: RunConfig, cluster: Cluster) -> int:
    """Start the run and, as often as `supervise.max_restarts` allows, resume it when a process of it died."""
    restarts: list[str] = []
    while True:
        outcome = launch_once(composed, config, cluster, restarts)
        if not can_resume(outcome) or len(restarts) >= config.supervise.max_restarts:
            return outcome.exit_code
        if outcome.signum is not None:
            say(f"{signal.Signals(outcome.signum).name} came while the run failed: it is not restarted")
            return outcome.exit_code
        restarts.append(str(outcome.reason).partition("\n")[0])
        text = f"the run is resumed (restart {len(restarts)} of {config.supervise.max_restarts})"
        say(text)
        logger.warning("%s, after: %s", text, outcome.reason)
        # The run that is there now is the one to continue.
        config = config.model_copy(update={"force_restart": False})


def launch_members(members: Sequence[Member]) -> int:
    """Run each as a launcher of its own, one after the other, and say how they went. One that fails costs the others
    nothing; a signal is passed on to the present one and is the last. The exit code is 0 if all of them succeed."""
    codes: list[int] = []
    events: SimpleQueue[Any] = SimpleQueue()
    with signals_as_events(events) as signals:
        for number, member in enumerate(members, start=1):
            if signals:
                break
            say(f"run {number} of {len(members)}: {member.folder}")
            # In a group of its own: a signal of the terminal reaches it once.
            child = subprocess.Popen([sys.executable, "-m", "pipelinerl.launch", *member.argv], process_group=0)
            threading.Thread(target=lambda child=child: events.put(child.wait()), daemon=True).start()
            while isinstance(event := events.get(), Interrupted):
                child.send_signal(event.signum)
            codes.append(event)
    for member, code in zip(members, codes, strict=False):
        say(f"{member.folder}: {'completed' if code == 0 else f'exit code {code}'}")
    say(*(f"{member.folder}: not started" for member in members[len(codes) :]))
    return 128 + signals[0] if signals else EXIT_RUN_FAILED if any(codes) else 0


def launch_once(composed: ComposedConfig, config: RunConfig, cluster: Cluster, restarts: Sequence[str]) -> Outcome:
    """Check, plan, enter the run directory and supervise. Nothing is written before everything is checked.

    `restarts`: why this launcher had to start the run again so far.
    """
    lines = check_start(Start(config, cluster, os.environ, composed.search_dirs))
    config = bounded_by_record(config)
    events: SimpleQueue[Event] = SimpleQueue()
    with gathered_nodes(config, cluster) as nodes, FreePorts(config, cluster.rank, nodes.busy_ports) as ports:
        world = build_world_map(config, cluster, ports, read_shape(config.model_path))
        with signals_as_events(events) as signals, enter(config) as entered:
            lines += [f"changed since the last start: {change}" for change in entered.changes]
            if entered.changes and entered.moved_to is not None:
                lines.append("the last start trained no step, so this is a new run")
            say(*lines, *(f"note: {note}" for note in [*composed.notes, *world.notes]))
            run_dir, identity = entered.run_dir, entered.identity
            # The launcher's own log goes to a file; the terminal belongs to the table.
            logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=run_dir.launch_log)
            save_config(config, run_dir.config_file)
            save_config(config, run_dir.config_of_start(identity.incarnation))
            run_dir.world_file.write_text(world.to_json(), encoding="utf-8")
            commands = build_commands(world, run_dir, os.environ, composed.search_dirs)
            # A token of the user's own lets servers join that somebody else starts (`pool add`).
            token = os.environ.get(TOKEN_KEY) or secrets.token_urlsafe(24)
            peers = nodes.send_plan(Plan(str(run_dir.root), identity.run_id, identity.incarnation, token), events)
            session = RunSession(config, world, run_dir, identity, commands, os.environ, token, events, tuple(restarts))
            outcome = supervise(session, peers, entered.moved_to)
            peers.end(outcome)
    return replace(outcome, signum=signals[0]) if signals else outcome


def follow(config: RunConfig, cluster: Cluster, search_dirs: Sequence[Path]) -> int:
    """On a node above 0: join node 0 and run this node's part of its plan; the exit code is the run's.

    `config` is as composed here; all but what is needed to find node 0 comes from node 0.
    """
    busy = busy_ports(config, cluster.master_port or DEFAULT_MASTER_PORT)
    hello = Hello(cluster.rank, cluster.world_size, __version__, list(cluster.gpus), busy)
    place, timeout_s = (cluster.hosts[0], config.world.node_port), config.supervise.nodes_timeout_s
    signals: SimpleQueue[Any] = SimpleQueue()
    with signals_as_events(signals):
        connection, plan = join(place, node_secret(os.environ), hello, timeout_s, signals)
    events: SimpleQueue[Event] = SimpleQueue()
    with signals_as_events(events):
        peers = Peers(cluster.rank, [NodeLink(connection, 0, cluster.hosts[0], events, config.supervise)])
        outcome = Outcome("failed", "its launcher failed", EXIT_RUN_FAILED)
        try:
            session = _join_session(plan, cluster, search_dirs, events)
            hub = StreamHub(session.config.streams, session.run_dir, session.identity.run_id, os.environ)
            outcome = supervise_jobs(session, hub, peers)
        except PipelineRLError as error:
            code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_FAILED
            outcome = Outcome("failed", str(error), code)
            raise
        finally:
            peers.end(outcome)
    say(f"node {cluster.rank}: {outcome.status}" + (f": {outcome.reason}" if outcome.reason else ""))
    return outcome.exit_code


def _join_session(plan: Plan, cluster: Cluster, search_dirs: Sequence[Path], events: SimpleQueue[Event]) -> RunSession:
    """The session that node 0 planned, as this node sees it.

    Raises:
        ConfigError: this node does not see the run directory of node 0: its streams would be written where nobody reads
            them. UserError: a check of this node fails.
    """
    run_dir = RunDir(Path(plan.run_dir))
    identity = read_identity(run_dir.identity_file) if run_dir.identity_file.exists() else None
    if identity is None or (identity.run_id, identity.incarnation) != (plan.run_id, plan.incarnation):
        found = "nothing there" if identity is None else f"run {identity.run_id}, start {identity.incarnation}"
        raise ConfigError(
            "output_dir",
            f"{run_dir.root} ({found})",
            f"run {plan.run_id}, start {plan.incarnation}, which node 0 wrote there",
            "Put output_dir on a file system that all nodes share, under the same path.",
        )
    config = load_config(run_dir.config_file)
    world = msgspec.structs.replace(WorldMap.from_json(run_dir.world_file.read_bytes()), rank=cluster.rank)
    check_node(Start(config, cluster, os.environ))
    log = run_dir.root / f"launch_node_{cluster.rank}.log"
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=log)
    commands = build_commands(world, run_dir, os.environ, search_dirs)
    say(f"node {cluster.rank}: starting {len(commands)} processes of run {plan.run_id} in {run_dir.root}")
    return RunSession(config, world, run_dir, identity, commands, os.environ, plan.token, events)


if __name__ == "__main__":
    sys.exit(main())
