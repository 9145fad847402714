"""One supervised run from entered directory to summary: death pipe, streams, tracking, supervisor, final words.

Called by the launcher. Waits where the supervisor waits. `summary.json` is written whatever happens.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipelinerl.config import RunConfig
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import EXIT_RUN_FAILED
from pipelinerl.finetune.best_model import best_model_of
from pipelinerl.records import PoolAnswer, PoolChange, TrainerMessage
from pipelinerl.run.completion import TrainingCompletion
from pipelinerl.run.last_save import NO_OTHERS, OtherLaunchers
from pipelinerl.run.monitor import StuckMonitor
from pipelinerl.run.policy import ExitPolicy
from pipelinerl.run.pool_requests import forget_requests, write_state
from pipelinerl.run.processes import Event, PoolAnswered, StreamFailed, become_subreaper
from pipelinerl.run.result_text import print_result
from pipelinerl.run.server_keeper import POLICY_KIND, ServerKeeper
from pipelinerl.run.start import Command, server_sockets
from pipelinerl.run.supervisor import COLLECT_S, NODES_COLLECT_S, Outcome, Supervisor
from pipelinerl.rundir.identity import RunIdentity
from pipelinerl.rundir.layout import RunDir, newest_training_state
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC, TRAINER_TOPIC, Entry
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.read import Feed
from pipelinerl.tracking.collector import Collector
from pipelinerl.tracking.summary import write_json
from pipelinerl.tracking.wandb_sink import first_line
from pipelinerl.world import SERVER_KINDS, WorldMap

logger = logging.getLogger(__name__)
# A process beats before it imports anything heavy.
START_GRACE_S = 60.0


@dataclass(frozen=True)
class RunSession:
    """What one start of a run consists of. `token` opens the servers' routes and lives in memory only. `restarts` says
    why the launcher has started the run again by itself, once for each time."""

    config: RunConfig
    world: WorldMap
    run_dir: RunDir
    identity: RunIdentity
    commands: Sequence[Command]
    environ: Mapping[str, str]
    token: str
    events: SimpleQueue[Event]
    restarts: tuple[str, ...] = ()
    others: OtherLaunchers = NO_OTHERS


def supervise(session: RunSession, moved_to: Path | None = None) -> Outcome:
    """Start and supervise all processes, then write the summary and say how it went."""
    _greet(session, moved_to)
    streams = backend_of(session.config.streams).serve(session.config.streams, session.run_dir, session.environ)
    with streams as with_streams, server_sockets(with_streams) as environ:
        return _supervise_and_report(replace(session, environ=environ))


def _supervise_and_report(session: RunSession) -> Outcome:
    try:
        hub = StreamHub(session.config.streams, session.run_dir, session.identity.run_id, session.environ)
        incarnation = session.identity.incarnation
        collector = Collector(hub, session.world, session.run_dir, session.config, incarnation=incarnation)
        collector.start()
    except Exception as error:
        write_json(session.run_dir.summary_file, {"status": "failed", "reason": f"launch: {error}"})
        raise
    try:
        outcome = _supervise(session, hub)
    except Exception as error:
        logger.exception("the launcher failed")
        collector.stop()  # the terminal is free again
        traceback.print_exc()
        outcome = Outcome("failed", f"launch: {type(error).__name__}: {error}", EXIT_RUN_FAILED, "launch")
    logger.info("%s: %s", outcome.status, outcome.reason)
    summary = collector.write_summary(outcome.status, outcome.reason)
    more: dict[str, Any] = {}
    if session.restarts:
        more |= {"restarts": len(session.restarts), "restart_reasons": list(session.restarts)}
    if (best := _settle_best(session, collector)) is not None:
        more |= {"best_model": best}
    if more:
        summary |= more
        try:
            write_json(session.run_dir.summary_file, summary)
        except OSError as error:  # how the run ended does not depend on it
            logger.error("%s cannot be written: %s", session.run_dir.summary_file, error)
    try:
        print_result(outcome, summary, session.run_dir)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: the exit code still has to say how the run went
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome


def _settle_best(session: RunSession, collector: Collector) -> dict[str, Any] | None:
    """Take the results that came behind the trainer's end. What cannot be done now, the next start does."""
    best = best_model_of(session.config, session.run_dir)
    if best is None:
        return None
    try:
        best.fold(collector.snapshot(lambda state: list(state.evaluations)))
        best.drop_rest()
        found = best.best
    except OSError as error:
        logger.warning("the best model is not settled: %s", error)
        return None
    names = ("version", "metric", "value", "min_version", "max_version")
    return None if found is None else {name: getattr(found, name) for name in names}


def _supervise(session: RunSession, hub: StreamHub) -> Outcome:
    config = session.config
    completion: Callable[[], bool] = _stage_is_done
    if has_stage(config, "finetune"):
        reader = hub.reader(TRAINER_TOPIC, "finetune_0", TrainerMessage)
        completion = TrainingCompletion(reader, session.identity.incarnation)
    if not become_subreaper():
        logger.warning("this system cannot re-parent orphans: processes that leave their group may survive the run")
    death_read, death_write = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, death_read)
        stack.callback(os.close, death_write)
        return Supervisor(
            commands=session.commands,
            run_dir=session.run_dir,
            config=config.supervise,
            policy=ExitPolicy([command.job for command in session.commands], completion),
            monitor=StuckMonitor(config.supervise, START_GRACE_S + config.supervise.heartbeat_timeout_s),
            environ=session.environ,
            token=session.token,
            death_fd=death_read,
            events=session.events,
            keeper=_keep_servers(session, hub, stack),
            others=session.others,
            collect_s=COLLECT_S if session.world.world_size == 1 else NODES_COLLECT_S,
        ).run()


def _stage_is_done() -> bool:
    """Without a trainer the other stages know themselves when they are done."""
    return True


def _keep_servers(session: RunSession, hub: StreamHub, stack: ExitStack) -> ServerKeeper:
    """The keeper of the servers, connected with the stream `pool` until `stack` is closed."""
    incarnation = session.identity.incarnation
    changes = hub.writer(POOL_TOPIC, LAUNCHER, PoolChange)
    stack.callback(changes.close)

    def announce(change: PoolChange) -> None:
        changes.write(change)
        changes.flush()

    def listen(entry: Entry[PoolAnswer]) -> None:
        if entry.record.incarnation == incarnation:
            session.events.put(PoolAnswered(entry.record))

    def fail(error: BaseException) -> None:
        session.events.put(StreamFailed(f"launch: the trainer's answers on servers cannot be followed: {error}"))

    feed = Feed(hub.reader(POOL_TOPIC, "finetune_0", PoolAnswer), listen, "pool", fail).start()
    stack.callback(_stop, feed)
    forget_requests(session.run_dir)
    world = session.world
    return ServerKeeper(
        [
            job
            for job in world.jobs
            if job.kind == POLICY_KIND or (job.kind in SERVER_KINDS and job in world.local_jobs)
        ],
        session.config.supervise,
        session.config.vllm_config.start_timeout_s,
        announce,
        incarnation,
        time.time(),
        on_change=lambda keeper: write_state(session.run_dir, [s for s in keeper.servers.values() if s.is_policy]),
        node_rank=world.rank,
    )


def _stop(feed: Feed[PoolAnswer]) -> None:
    """What it died of has been named, and does not change how the run ended."""
    with suppress(Exception):
        feed.stop()


def _greet(session: RunSession, moved_to: Path | None) -> None:
    identity = session.identity
    if moved_to is not None:
        sys.stderr.write(f"the previous run was moved to {moved_to}\n")
    what = f"starting run {identity.run_id}"
    if identity.incarnation:
        what = f"continuing run {identity.run_id} behind step {newest_training_state(session.run_dir) or 0}"
    text = f"{what} in {session.run_dir.root}: {len(session.commands)} processes"
    sys.stderr.write(f"{text} (each has its logs in {session.run_dir.root}/<job>/)\n")
    logger.info(text)
    if (tracking := first_line(session.config, session.run_dir.root)) is not None:
        sys.stderr.write(f"{tracking}\n")
