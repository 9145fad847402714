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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.compose import ComposedConfig, Member, compose
from pipelinerl.config.load import save_config
from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, ConfigError, PipelineRLError, UserError
from pipelinerl.role import LOG_FORMAT, SECRET_KEYS, TOKEN_KEY
from pipelinerl.run.model_folder import read_shape
from pipelinerl.run.node import FindNodes, Place
from pipelinerl.run.preflight import Start, check_dry_run, check_start
from pipelinerl.run.processes import Event, Interrupted, Outcome, signals_as_events
from pipelinerl.run.restart import can_resume
from pipelinerl.run.session import supervise
from pipelinerl.run.show import print_plan
from pipelinerl.run.start import RunSession, build_commands, enter
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.open_run import bounded_by_record
from pipelinerl.world import (
    Cluster,
    ClusterMember,
    ClusterNode,
    FreePorts,
    build_world_map,
    described_cluster,
    nvml_gpu_lister,
    nvml_gpu_memory,
    slurm_hint,
    usable_cores,
)

logger = logging.getLogger(__name__)
_MODE_KEY = "RAY_AUTH_MODE"
_MIN_TOKEN_CHARACTERS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launcher and return its exit code."""
    return start(lambda: compose(sys.argv[1:] if argv is None else argv, may_be_several=True))


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
        config = composed.config.of_stage()
        member = ClusterMember.from_env(os.environ, config.world.cluster)
        machine = ClusterNode.from_env(os.environ, nvml_gpu_lister, usable_cores(), nvml_gpu_memory)
        if config.dry_run:
            return show_plan(composed, config, described_cluster(config.world, machine, member))
        check_described(config, member, machine)
        if member.rank > 0:
            return load_bring_up(member).serve_node(config, member, machine)
        with found_nodes(config, member, machine) as find:
            return launch(composed, config, find)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except PipelineRLError as error:  # raised while no job was running
        sys.stderr.write(f"error: {error}\n")
        return EXIT_RUN_FAILED
    except KeyboardInterrupt as error:
        sys.stderr.write("interrupted; no job was running\n")
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


def check_described(config: RunConfig, member: ClusterMember, machine: ClusterNode) -> None:
    """Refuse a `world.nodes` that is not the machines on which the command was started."""
    if config.world.nodes is None or config.world.cluster == "ray":
        return
    sizes = [node.gpus for node in config.world.nodes]
    if member.world_size > 1:
        is_right, expected = len(sizes) == member.world_size, f"{member.world_size} nodes, as WORLD_SIZE says"
    else:
        is_right = sizes == [len(machine.gpus)]
        expected = f"null, or this machine alone with its {len(machine.gpus)} GPUs, without a cluster"
    if not is_right:
        raise ConfigError(
            "world.nodes",
            f"{len(sizes)} with {', '.join(map(str, sizes))} GPUs",
            expected,
            "Use world.cluster=ray, start the same command on all nodes (docs/nodes.md), or dry_run=true.",
        )


@contextmanager
def found_nodes(config: RunConfig, member: ClusterMember, machine: ClusterNode) -> Iterator[FindNodes]:
    """How this launcher finds the nodes of its runs: it is this machine alone, or a Ray cluster, which it brings up if
    the same command was started on several nodes."""
    if config.world.cluster != "ray" and member.world_size == 1:
        cluster = Cluster((machine,), 0, member.master_port)
        yield lambda events: nullcontext(Place(cluster))
        return
    with load_bring_up(member).cluster_nodes(config, member, machine) as find:
        yield find


def load_bring_up(member: ClusterMember) -> ModuleType:
    """The code for several nodes. Raises ConfigError without Ray, or without the token of a cluster of our own."""
    if member.world_size > 1:
        require_token(os.environ)
        os.environ.setdefault(_MODE_KEY, "token")  # Ray reads its variables when it is imported
    # Ray ends a driver that has not reached the head for so many seconds. We name what is gone, and end ourselves.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")
    try:
        return import_module("pipelinerl.run.bring_up")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        expected = "the package ray, for a run over several nodes"
        raise ConfigError("world.cluster", None, expected, "Install it: pip install 'pipelinerl[ray]'.") from error


def require_token(environ: Mapping[str, str]) -> None:
    """Refuse to bring a Ray cluster up that asks nobody for a token, unless the user says so."""
    token = environ.get(SECRET_KEYS[0], "")
    is_off = environ.get(_MODE_KEY, "token") != "token"
    if is_off or environ.get(SECRET_KEYS[1]) or len(token) >= _MIN_TOKEN_CHARACTERS:
        return
    next_step = f"Make one with `openssl rand -hex 32` and export {SECRET_KEYS[0]} on all nodes.{slurm_hint(environ)}"
    raise ConfigError(
        SECRET_KEYS[0],
        f"{len(token)} characters" if token else None,
        f"at least {_MIN_TOKEN_CHARACTERS} characters, the same on every node (WORLD_SIZE is above 1)",
        next_step,
    )


def launch(composed: ComposedConfig, config: RunConfig, find: FindNodes) -> int:
    """Start the run and, as often as `supervise.max_restarts` allows, resume it when a process of it died."""
    restarts: list[str] = []
    while True:
        outcome, is_over = launch_once(composed, config, find, restarts)
        if is_over:
            return outcome.exit_code
        restarts.append(str(outcome.reason).partition("\n")[0])
        text = f"the run is resumed (restart {len(restarts)} of {config.supervise.max_restarts})"
        say(text)
        logger.warning("%s, after: %s", text, outcome.reason)
        # The run that is there now is the one to continue.
        config = config.model_copy(update={"force_restart": False})


def launch_members(members: Sequence[Member]) -> int:
    """Run each as a launcher of its own, one after the other, and say how they went. One that fails costs the others
    nothing; a signal stops the current one and starts no more. The exit code is 0 if all of them succeed."""
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


def launch_once(
    composed: ComposedConfig, config: RunConfig, find: FindNodes, restarts: Sequence[str]
) -> tuple[Outcome, bool]:
    """Check, plan, enter the run directory and supervise. Nothing is written before everything is checked.

    Args:
        restarts: why this launcher had to start the run again so far.

    Returns:
        How it ended, and whether it stays so.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    with find(events) as place:
        try:
            outcome = _supervised(composed, config, place, events, restarts)
        except UserError as error:
            place.end(Outcome("failed", str(error), EXIT_USER_ERROR))
            raise
        is_over = not can_resume(outcome) or len(restarts) >= config.supervise.max_restarts
        if not is_over and outcome.signum is not None:
            say(f"{signal.Signals(outcome.signum).name} came while the run failed: it is not restarted")
            is_over = True
        if is_over:
            place.end(outcome)
        return outcome, is_over


def _supervised(
    composed: ComposedConfig, config: RunConfig, place: Place, events: SimpleQueue[Event], restarts: Sequence[str]
) -> Outcome:
    cluster = place.cluster
    lines = check_start(Start(config, cluster, os.environ, composed.search_dirs, has_agents=place.has_agents))
    config = bounded_by_record(config)
    with FreePorts(config, cluster.rank, place.busy_ports) as ports:
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
            session = RunSession(config, world, run_dir, identity, commands, os.environ, token, events, tuple(restarts))
            outcome = supervise(session, place.open, entered.moved_to)
    return replace(outcome, signum=signals[0]) if signals else outcome


def say(*lines: str) -> None:
    """Tell the user at the terminal."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
