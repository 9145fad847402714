"""One supervised run, from the entered directory to `summary.json`, which is written whatever happens."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelinerl.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, UserError
from pipelinerl.finetune.best_model import best_model_of
from pipelinerl.records import PoolAnswer, PoolChange, TrainerMessage
from pipelinerl.run.node import OpenNodes, this_machine
from pipelinerl.run.pool_command import forget_requests
from pipelinerl.run.processes import Outcome, PoolAnswered, StreamFailed
from pipelinerl.run.restart import ExitPolicy, ServerKeeper
from pipelinerl.run.show import evaluation_report, print_evaluation, print_result
from pipelinerl.run.start import RunSession
from pipelinerl.run.watch import Supervisor
from pipelinerl.rundir.layout import newest_training_state
from pipelinerl.streams.base import LAUNCHER, POOL_TOPIC, TRAINER, TRAINER_TOPIC, Entry
from pipelinerl.streams.hub import StreamHub, backend_of
from pipelinerl.streams.read import Feed
from pipelinerl.tracking.collector import Collector
from pipelinerl.tracking.summary import write_json
from pipelinerl.tracking.wandb_sink import first_line

logger = logging.getLogger(__name__)


def supervise(session: RunSession, open_nodes: OpenNodes = this_machine, moved_to: Path | None = None) -> Outcome:
    """Start and supervise all processes, then write the summary and say how it went.

    Args:
        session: what to run.
        open_nodes: makes the nodes of the run ready to start its jobs.
        moved_to: where the run is that was in the directory before.
    """
    _greet(session, moved_to)
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
        except UserError as error:  # a node of the cluster cannot be used
            outcome = Outcome("failed", str(error), EXIT_USER_ERROR)
        except Exception as error:
            logger.exception("the launcher failed")
            collector.stop()  # the terminal is free again
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
    except BrokenPipeError:  # `| head`: the exit code still has to say how the run went
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome


def supervise_jobs(session: RunSession, hub: StreamHub, open_nodes: OpenNodes = this_machine) -> Outcome:
    """Start the jobs and block until the run is over and all of them are gone."""
    with ExitStack() as stack:
        nodes = stack.enter_context(open_nodes(session))
        forget_requests(session.run_dir)
        changes = hub.writer(POOL_TOPIC, LAUNCHER, PoolChange)
        stack.callback(changes.close)
        stack.callback(_stop, _follow_answers(session, hub))
        trainer = hub.reader(TRAINER_TOPIC, TRAINER, TrainerMessage) if session.config.has_stage("finetune") else None
        jobs = [command.job for command in session.commands]
        policy = ExitPolicy(jobs, trainer, session.identity.incarnation)
        return Supervisor(session, policy, ServerKeeper(session, time.monotonic(), changes), nodes).run()


def _follow_answers(session: RunSession, hub: StreamHub) -> Feed[PoolAnswer]:
    def listen(entry: Entry[PoolAnswer]) -> None:
        if entry.record.incarnation == session.identity.incarnation:
            session.events.put(PoolAnswered(entry.record))

    def fail(error: BaseException) -> None:
        session.events.put(StreamFailed(f"launch: the trainer's answers on servers cannot be followed: {error}"))

    return Feed(hub.reader(POOL_TOPIC, TRAINER, PoolAnswer), listen, "pool", fail).start()


def _stop(feed: Feed[PoolAnswer]) -> None:
    """What it died of has been named, and does not change how the run ended."""
    with suppress(Exception):
        feed.stop()


def _summarize(session: RunSession, outcome: Outcome, collector: Collector) -> dict[str, Any]:
    """Write `summary.json` and return its content."""
    collector.stop()
    if session.config.debug.mode == "evaluation" and (found := collector.snapshot(lambda each: list(each.evaluations))):
        with suppress(OSError):  # the disk is full: the table is printed, and the stream has the results
            write_json(session.run_dir.evaluation_file, evaluation_report(session.config, found))
    more: dict[str, Any] = {}
    if session.restarts:
        more |= {"restarts": len(session.restarts), "restart_reasons": list(session.restarts)}
    if (best := _settle_best(session, collector)) is not None:
        more |= {"best_model": best}
    return collector.write_summary(outcome.status, outcome.reason, more)


def _settle_best(session: RunSession, collector: Collector) -> dict[str, Any] | None:
    """Consider the results that came after the trainer's end. What cannot be done now, the next start does."""
    best = best_model_of(session.config, session.run_dir)
    if best is None:
        return None
    try:
        best.settle(collector.snapshot(lambda state: list(state.evaluations)))
        best.drop_rest()
        found = best.best
    except OSError as error:
        logger.warning("the best model is not settled: %s", error)
        return None
    names = ("version", "metric", "value", "min_version", "max_version")
    return None if found is None else {name: getattr(found, name) for name in names}


def _greet(session: RunSession, moved_to: Path | None) -> None:
    identity = session.identity
    if moved_to is not None:
        sys.stderr.write(f"the previous run was moved to {moved_to}\n")
    what = f"starting run {identity.run_id}"
    if identity.incarnation:
        what = f"continuing run {identity.run_id} after step {newest_training_state(session.run_dir) or 0}"
    text = f"{what} in {session.run_dir.root}: {len(session.commands)} processes"
    sys.stderr.write(f"{text} (each has its logs in {session.run_dir.root}/<job>/)\n")
    logger.info(text)
    if (tracking := first_line(session.config, session.run_dir.root)) is not None:
        sys.stderr.write(f"{tracking}\n")
