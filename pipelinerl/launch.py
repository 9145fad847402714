"""Main of the orchestrator: `python -m pipelinerl.launch [--config-name NAME] [key=value ...]`.

Composes and checks the configuration, plans the run, and supervises its processes until training is complete. Exit
codes: 0 training is complete, 1 the run failed, 2 something has to be changed, 128 + n stopped by signal n.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
from pipelinerl.finetune.best_model import best_model_of
from pipelinerl.records import PoolAnswer, PoolChange, TrainerMessage
from pipelinerl.role import LOG_FORMAT, SECRET_KEYS, TOKEN_KEY
from pipelinerl.run.model_folder import read_shape
from pipelinerl.run.node import FindNodes, OpenNodes, Place, this_machine
from pipelinerl.run.pool_command import forget_requests
from pipelinerl.run.preflight import Start, check_dry_run, check_start
from pipelinerl.run.processes import Event, Interrupted, Outcome, StreamFailed, signals_as_events
from pipelinerl.run.restart import ExitPolicy, ServerKeeper, can_resume
from pipelinerl.run.show import evaluation_report, print_evaluation, print_plan, print_result
from pipelinerl.run.start import RunSession, build_command, enter
from pipelinerl.run.watch import Supervisor
from pipelinerl.rundir.layout import RunDir, newest_training_state
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC, TRAINER, TRAINER_TOPIC, Entry
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.open_run import bounded_by_record
from pipelinerl.streams.read import Feed
from pipelinerl.tracking.collector import Collector
from pipelinerl.tracking.summary import write_json
from pipelinerl.tracking.wandb_sink import first_line
from pipelinerl.world import (
    Cluster,
    ClusterMember,
    ClusterNode,
    FreePorts,
    build_world_map,
    described_cluster,
    slurm_hint,
)

logger = logging.getLogger(__name__)
_MODE_KEY = "RAY_AUTH_MODE"
_MIN_TOKEN_CHARACTERS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run one launcher and return its exit code."""
    return start(lambda: compose(sys.argv[1:] if argv is None else argv, may_be_several=True))


def start(compose_config: Callable[[], ComposedConfig]) -> int:
    """Start the composed runs, or print the plan, and return the exit code. Errors become messages."""
    try:
        composed = compose_config()
        if composed.members:
            return launch_members(composed.members)
        if composed.config is None:
            sys.stdout.write(f"{composed.help_text}\n")
            return 0
        # User classes loaded in this process (`tracking.sinks`). Last on the path, so that they shadow nothing.
        sys.path += [str(folder) for folder in composed.search_dirs]
        config = composed.config.of_stage()
        member = ClusterMember.from_env(os.environ, config.world.cluster)
        machine = ClusterNode.from_env(os.environ)
        if config.dry_run:
            return show_plan(composed, config, described_cluster(config.world, machine, member))
        check_described(config, member, machine)
        if member.rank > 0:
            return load_bring_up(member).serve_node(config, member, machine)
        with found_nodes(config, member, machine) as find:
            return launch(composed, config, find)
    except PipelineRLError as error:  # raised while no job was running
        say(f"error: {error}")
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_FAILED
    except KeyboardInterrupt as error:
        say("interrupted; no job was running")
        signum: int = error.args[0] if error.args else signal.SIGINT  # Python's own has none
        return 128 + signum


def show_plan(composed: ComposedConfig, config: RunConfig, cluster: Cluster) -> int:
    """Print what `launch` would start and, on stderr, the checks that need no start."""
    checked = check_dry_run(Start(config, cluster, os.environ, composed.search_dirs, is_dry_run=True))
    world = build_world_map(config, cluster, model=read_shape(config.model_path))
    run_dir = RunDir(Path(config.output_dir).absolute())
    commands = [build_command(job, world, run_dir, os.environ, composed.search_dirs) for job in world.jobs]
    print_plan(config, world, commands, composed.notes)
    sys.stdout.flush()
    say(checked)
    return 0


def check_described(config: RunConfig, member: ClusterMember, machine: ClusterNode) -> None:
    """Refuse `world.nodes` unless it describes the machines on which the command was started."""
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
    """The code for several nodes. Raises ConfigError if Ray is missing, or the token of a cluster that we start."""
    if member.world_size > 1:
        require_token(os.environ)
        os.environ.setdefault(_MODE_KEY, "token")  # Ray reads its variables when it is imported
    # Ray kills a driver that has lost the head for this many seconds. The launcher reports what is gone and exits
    # itself.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no cluster of this machine alone behind our back
    try:
        return import_module("pipelinerl.run.bring_up")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        expected = "the package ray, for a run over several nodes"
        raise ConfigError("world.cluster", None, expected, "Install it: pip install 'pipelinerl[ray]'.") from error


def require_token(environ: Mapping[str, str]) -> None:
    """Refuse to start a Ray cluster without authentication, unless the user disabled it."""
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
    """Start the run, and resume it up to `supervise.max_restarts` times when one of its processes dies."""
    restarts: list[str] = []  # why
    while True:
        events: SimpleQueue[Event] = SimpleQueue()
        with find(events) as place:
            try:
                outcome = _supervised(composed, config, place, events, restarts)
            except UserError as error:
                place.end(Outcome("failed", str(error), EXIT_USER_ERROR))
                raise
            is_over = not can_resume(outcome) or len(restarts) >= config.supervise.max_restarts
            if not is_over and outcome.signum is not None:
                say(f"{signal.Signals(outcome.signum).name} arrived while the run was failing: not restarting it")
                is_over = True
            if is_over:
                place.end(outcome)
                return outcome.exit_code
        restarts.append(str(outcome.reason).partition("\n")[0])
        text = f"the run is resumed (restart {len(restarts)} of {config.supervise.max_restarts})"
        say(text)
        logger.warning("%s, after: %s", text, outcome.reason)
        # From now on it continues the run that it started.
        config = config.model_copy(update={"force_restart": False})


def launch_members(members: Sequence[Member]) -> int:
    """Run one launcher for each, one after the other, and print how they ended. A failed run does not affect the
    others; a signal stops the current one and starts no more. The exit code is 0 if all succeed."""
    codes: list[int] = []
    events: SimpleQueue[Any] = SimpleQueue()
    with signals_as_events(events) as signals:
        for number, member in enumerate(members, start=1):
            if signals:
                break
            say(f"run {number} of {len(members)}: {member.folder}")
            # In its own process group, so that a signal from the terminal reaches it only once.
            child = subprocess.Popen([sys.executable, "-m", "pipelinerl.launch", *member.argv], process_group=0)
            threading.Thread(target=lambda child=child: events.put(child.wait()), daemon=True).start()
            while isinstance(event := events.get(), Interrupted):
                child.send_signal(event.signum)
            codes.append(event)
    for member, code in zip(members, codes, strict=False):
        say(f"{member.folder}: {'completed' if code == 0 else f'exit code {code}'}")
    say(*(f"{member.folder}: not started" for member in members[len(codes) :]))
    return 128 + signals[0] if signals else EXIT_RUN_FAILED if any(codes) else 0


def _supervised(
    composed: ComposedConfig, config: RunConfig, place: Place, events: SimpleQueue[Event], restarts: Sequence[str]
) -> Outcome:
    """Check, plan, enter the run directory and supervise. Nothing is written before all checks pass."""
    cluster = place.cluster
    dirs, is_restart = composed.search_dirs, bool(restarts)
    lines = check_start(Start(config, cluster, os.environ, dirs, has_agents=place.has_agents, is_restart=is_restart))
    config = bounded_by_record(config)
    with FreePorts(config, cluster.rank, place.busy_ports) as ports:
        world = build_world_map(config, cluster, ports, read_shape(config.model_path))
        with signals_as_events(events) as signals, enter(config) as entered:
            lines += [f"changed since the last start: {change}" for change in entered.changes]
            if entered.changes and entered.moved_to is not None:
                lines.append("the last start trained no step, so this is a new run")
            lines += [f"note: {note}" for note in [*composed.notes, *world.notes]]
            if entered.moved_to is not None:
                lines.append(f"the previous run was moved to {entered.moved_to}")
            say(*lines)
            run_dir, identity = entered.run_dir, entered.identity
            # The launcher's own log goes to a file; the terminal belongs to the table.
            logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=run_dir.launch_log)
            save_config(config, run_dir.config_file)
            save_config(config, run_dir.config_of_start(identity.incarnation))
            run_dir.world_file.write_text(world.to_json(), encoding="utf-8")
            commands = [build_command(job, world, run_dir, os.environ, composed.search_dirs) for job in world.jobs]
            # With a token set by the user, servers started by hand can join (`pool add`).
            token = os.environ.get(TOKEN_KEY) or secrets.token_urlsafe(24)
            session = RunSession(config, world, run_dir, identity, commands, os.environ, token, events, tuple(restarts))
            outcome = supervise(session, place.open)
    return replace(outcome, signum=signals[0]) if signals else outcome


def supervise(session: RunSession, open_nodes: OpenNodes = this_machine) -> Outcome:
    """Start and supervise all processes, then write `summary.json` (always) and print the result.

    Args:
        session: what to run.
        open_nodes: prepares the nodes of the run.
    """
    _greet(session)
    config, run_dir = session.config, session.run_dir
    with ExitStack() as stack:
        try:
            server = backend_of(config.streams).serve(config.streams, run_dir, session.environ)
            session = replace(session, environ=stack.enter_context(server))
            hub = StreamHub(config.streams, run_dir, session.identity.run_id, session.environ)
            collector = Collector(hub, session.world, run_dir, config, incarnation=session.identity.incarnation)
            collector.start()
        except Exception as error:
            write_json(run_dir.summary_file, {"status": "failed", "reason": f"launch: {error}"})
            raise
        try:
            outcome = supervise_jobs(session, hub, open_nodes)
        except UserError as error:  # a node cannot be used
            outcome = Outcome("failed", str(error), EXIT_USER_ERROR)
        except Exception as error:
            logger.exception("the launcher failed")
            collector.stop()  # frees the terminal
            traceback.print_exc()
            outcome = Outcome("failed", f"launch: {type(error).__name__}: {error}", EXIT_RUN_FAILED, "launch")
        logger.info("%s: %s", outcome.status, outcome.reason)
        summary = _summarize(session, outcome, collector)
    try:
        if config.debug.mode == "evaluation":
            print_evaluation(outcome, collector.snapshot(lambda state: list(state.evaluations)), run_dir)
        else:
            print_result(outcome, summary, run_dir)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: keep the exit code of the run
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome


def supervise_jobs(session: RunSession, hub: StreamHub, open_nodes: OpenNodes) -> Outcome:
    """Start the jobs and block until the run is over and all processes are gone."""
    with ExitStack() as stack:
        nodes = stack.enter_context(open_nodes(session))
        forget_requests(session.run_dir)
        changes = hub.writer(POOL_TOPIC, LAUNCHER, PoolChange)
        stack.callback(changes.close)
        answers = _follow_answers(session, hub)

        @stack.callback
        def stop() -> None:
            with suppress(Exception):  # already reported; it does not change the outcome
                answers.stop()

        trainer = hub.reader(TRAINER_TOPIC, TRAINER, TrainerMessage) if session.config.has_stage("finetune") else None
        jobs = [command.job for command in session.commands]
        policy = ExitPolicy(jobs, trainer, session.identity.incarnation)
        return Supervisor(session, policy, ServerKeeper(session, time.monotonic(), changes), nodes).run()


def _follow_answers(session: RunSession, hub: StreamHub) -> Feed[PoolAnswer]:
    def listen(entry: Entry[PoolAnswer]) -> None:
        if entry.record.incarnation == session.identity.incarnation:
            session.events.put(entry.record)

    def fail(error: BaseException) -> None:
        session.events.put(StreamFailed(f"launch: cannot follow the trainer's messages about servers: {error}"))

    return Feed(hub.reader(POOL_TOPIC, TRAINER, PoolAnswer), listen, "pool", fail).start()


def _summarize(session: RunSession, outcome: Outcome, collector: Collector) -> dict[str, Any]:
    """Write `summary.json` and return its content."""
    collector.stop()
    if session.config.debug.mode == "evaluation" and (found := collector.snapshot(lambda each: list(each.evaluations))):
        with suppress(OSError):  # full disk: the table is printed anyway, and the stream has the results
            write_json(session.run_dir.evaluation_file, evaluation_report(session.config, found))
    more: dict[str, Any] = {}
    if session.restarts:
        more |= {"restarts": len(session.restarts), "restart_reasons": list(session.restarts)}
    if (best := _settle_best(session, collector)) is not None:
        more |= {"best_model": best}
    return collector.write_summary(outcome.status, outcome.reason, more)


def _settle_best(session: RunSession, collector: Collector) -> dict[str, Any] | None:
    """Process the results that arrived after the trainer ended. What fails now is done by the next start."""
    best = best_model_of(session.config, session.run_dir)
    if best is None:
        return None
    try:
        best.settle(collector.snapshot(lambda state: list(state.evaluations)))
        best.drop_rest()
        found = best.best
    except OSError as error:
        logger.warning("the best model could not be determined: %s", error)
        return None
    names = ("version", "metric", "value", "min_version", "max_version")
    return None if found is None else {name: getattr(found, name) for name in names}


def _greet(session: RunSession) -> None:
    identity, root = session.identity, session.run_dir.root
    what = f"starting run {identity.run_id}"
    if identity.incarnation:
        what = f"continuing run {identity.run_id} after step {newest_training_state(session.run_dir) or 0}"
    text = f"{what} in {root}: {len(session.commands)} processes"
    logger.info(text)
    say(f"{text} (each has its logs in {root}/<job>/)")
    if (tracking := first_line(session.config, root)) is not None:
        say(tracking)


def say(*lines: str) -> None:
    """Print to the terminal."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
