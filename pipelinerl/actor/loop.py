"""The actor's life on one page: wait for weights, evaluate, roll out until training is done, evaluate.

Called by `main`.

| loop | waits for | who wakes it |
|---|---|---|
| `run_actor` | first weight update; end of training | trainer's messages |
| `TrainingRollouts.run` | a free slot and room in the sample budget | rollouts that end; steps and fates |
| `run_group` | its last attempt | workers' answers, at the latest each attempt's deadline |
| `Scheduler.run` | a free slot; the answer | another rollout's end; the worker, or the deadline |
| `_evaluate_when_due` | a version at which an evaluation is due | trainer's messages |
| `_report` | the next version, at most a few seconds | trainer's messages, the clock |
| `DrainAnswers.write` | the next answer to a request to drain | the gate, when nothing runs |
| `WorkerPool._follow` | a worker's next message | the worker, or its end |
| feeds `trainer`, `fates`, `turns`, `pool` (threads) | the next record | trainer, preprocessor, launcher |
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from pipelinerl.actor.drain_requests import follow_drain_requests
from pipelinerl.actor.evaluation import as_final
from pipelinerl.actor.membership import follow_pool
from pipelinerl.actor.parts import ActorParts, assemble
from pipelinerl.actor.pool import WorkerPool
from pipelinerl.actor.resume import (
    INTERRUPTED,
    find_evaluations,
    find_started_groups,
    find_unsettled_groups,
)
from pipelinerl.actor.servers import fetch_max_model_lens
from pipelinerl.actor.trainer_state import follow_trainer
from pipelinerl.domains.problem_sets import ProblemSets
from pipelinerl.errors import UserError
from pipelinerl.records import EvaluationResult
from pipelinerl.role import RoleContext

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 5.0


async def run_actor(context: RoleContext, problems: ProblemSets, pool: WorkerPool) -> None:
    """Run the actor until training is complete and the last evaluation is written.

    Raises:
        DomainError: user code returned something that it must not.
        WorkerError: a rollout worker died, or too many rollouts failed.
        StreamError: a stream cannot be read or written.
    """
    parts = assemble(context, problems, pool)
    try:
        async with asyncio.TaskGroup() as background:
            broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            watch = background.create_task(_raise_when_broken(broken))

            def on_failure(error: BaseException) -> None:
                if not broken.done():
                    broken.set_exception(error)

            with ExitStack() as feeds:
                feeds.enter_context(
                    follow_trainer(context.streams, parts.trainer, context.heartbeat.progress, on_failure)
                )
                feeds.enter_context(follow_pool(context.streams, parts.members, on_failure))
                if parts.gate is not None:
                    feeds.enter_context(
                        follow_drain_requests(context.streams, parts.gate, context.incarnation, on_failure)
                    )
                try:
                    await pool.start(background)
                    helpers = [watch, background.create_task(_report(parts))]
                    if parts.answers is not None:
                        helpers.append(background.create_task(parts.answers.write()))
                    await _live(context, parts, pool)
                    for task in helpers:
                        task.cancel()
                finally:
                    await pool.close()
    except BaseExceptionGroup as errors:
        raise root_cause(errors) from errors
    finally:
        async with AsyncExitStack() as writers:
            writers.push_async_callback(parts.publisher.close)
            writers.push_async_callback(parts.recorder.close)
            if parts.answers is not None:
                writers.push_async_callback(parts.answers.close)


async def _live(context: RoleContext, parts: ActorParts, pool: WorkerPool) -> None:
    trainer = parts.trainer
    start_timeout_s = context.config.vllm_config.start_timeout_s
    if parts.alone is not None:
        with context.heartbeat.waiting("servers to start", start_timeout_s):
            await parts.alone.wait_for_servers(parts.server_urls, context.token, start_timeout_s)
    with context.heartbeat.waiting("the first weight update", start_timeout_s):
        await trainer.wait_for(lambda: trainer.version is not None)
    servers = await fetch_max_model_lens(parts.server_urls, context.token)
    await pool.wait_ready(servers)
    parts.members.begin(servers)

    first_version = trainer.current_version
    if context.incarnation > 0:
        await _take_up(context, parts)
    made = find_evaluations(context.streams, context.job.name)
    if not made:
        logger.info("servers have version %d: evaluation before training", first_version)
        await _evaluate(parts, first_version, is_final=False, concurrency=parts.slots.total)
    parts.evaluations.start_at(max((version for version, _ in made), default=first_version))

    parts.throughput.restart()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.training.run())
        beside = tasks.create_task(_evaluate_when_due(parts))

    if parts.alone is None and (trainer.current_version, True) not in made:
        if final := as_final(beside.result(), trainer.current_version):
            logger.info("training is done at version %d, which was just evaluated", trainer.current_version)
            await parts.publisher.publish_evaluation(final)
        else:
            logger.info("training is done at version %d: last evaluation", trainer.current_version)
            await _evaluate(parts, trainer.current_version, is_final=True, concurrency=parts.slots.total)
    await parts.report()


async def _take_up(context: RoleContext, parts: ActorParts) -> None:
    """After a restart, charge what is still on its way to the trainer, and run again what was cut off.

    No message of the trainer is taken while the samples are charged, so that a step settles its groups before that or
    after it.
    """
    started = find_started_groups(context.streams, context.job.name)
    for group_id, num_rollouts in started.open_groups.items():
        await parts.publisher.give_up_group(group_id, [], num_rollouts, INTERRUPTED, parts.trainer.current_version)
    version, steps_done = parts.trainer.current_version, parts.trainer.steps_done
    parts.training.passes.resume(started.numbers_due, started.next_number)
    parts.training.numbers = itertools.chain(started.numbers_due, itertools.count(started.next_number))
    groups = find_unsettled_groups(context.streams, context.job.name, steps_done)
    for group_id, sample_ids in groups.items():
        parts.budget.publish(group_id, sample_ids)
        if parts.alone is not None:
            parts.alone.published(group_id, len(sample_ids))
        for count in Counter(sample_id.rpartition("/")[0] for sample_id in sample_ids).values():
            parts.budget.observe_rollout(count)
    logger.info(
        "restarted at version %d with %d samples in flight; %d groups are run again",
        version,
        parts.budget.charged_samples,
        len(started.numbers_due),
    )


async def _evaluate_when_due(parts: ActorParts) -> list[EvaluationResult]:
    """Evaluate beside training; an evaluation that runs when training ends is still brought to its end.

    Returns the results of the last one.
    """
    results: list[EvaluationResult] = []
    with parts.trainer.subscribe() as changed:
        while not parts.trainer.done:
            changed.clear()
            due = parts.evaluations.take_due(parts.trainer.current_version)
            if due is None:
                await changed.wait()
            else:
                results = await _evaluate(parts, due, is_final=False, concurrency=parts.evaluation_concurrency)
    return results


async def _evaluate(parts: ActorParts, due_version: int, *, is_final: bool, concurrency: int) -> list[EvaluationResult]:
    if not parts.evaluator.problems:
        return []
    async with _evaluation_turn(parts):
        results = await parts.evaluator.run(due_version, lambda: parts.trainer.current_version, is_final, concurrency)
    await parts.publisher.publish_evaluation(results)
    for result in results:
        if result.success_rate is None:
            logger.error("the evaluation due at version %d failed: no rollout came to an end", due_version)
            continue
        logger.info(
            "evaluation at version %d, %s: success %.3f, reward %.3f, %d rollouts (%d failed), %.1f s",
            due_version,
            result.dataset_name,
            result.success_rate,
            result.mean_reward,
            result.num_rollouts,
            result.num_failed,
            result.seconds,
        )
    return results


@asynccontextmanager
async def _evaluation_turn(parts: ActorParts) -> AsyncIterator[None]:
    """On shared devices an evaluation is a whole: the trainer waits for its end, and none starts while it trains."""
    if parts.gate is None or not parts.evaluations_pass_gate:
        yield
        return
    while not parts.gate.is_open:
        await parts.gate.wait_open()
    with parts.gate.passing():
        yield


async def _report(parts: ActorParts) -> None:
    """Write metrics at every new version from the first one on, and every few seconds between them."""
    interval_s = parts.report_interval_s or _REPORT_INTERVAL_S
    reported: int | None = None
    with parts.trainer.subscribe() as changed:
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    while parts.trainer.version == reported:
                        changed.clear()
                        await changed.wait()
            except TimeoutError:
                pass
            reported = parts.trainer.version
            # While the servers wait for weights there is no version to write it for: in a resumed run it is not 0.
            if reported is not None:
                await parts.report()


async def _raise_when_broken(broken: asyncio.Future[None]) -> None:
    await broken


def root_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error to report: a user error if there is one, else the first that was raised."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [errors]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, UserError)), leaves[0])
