"""`python -m pipelinerl.actor.main --run-dir DIR --job actor_0`: the process that produces rollouts.

Problems become groups of rollouts on the stream `actor`:

    ProblemOrder -> GroupRunner -> Scheduler -> WorkerPool -> worker processes -> servers
                    (SampleBudget)  (slots)

| task                     | waits for                                      | woken by                               |
|--------------------------|------------------------------------------------|----------------------------------------|
| `_begin`                 | the first weight update                        | the trainer, at most the start timeout |
| `GroupRunner.run`        | a free slot and room in the sample budget      | rollouts that end; steps and fates     |
| a group                  | its last attempt                               | workers; each attempt has a deadline   |
| `Scheduler.run`          | a free slot, the end of a pause; the answer    | other rollouts; the trainer; a worker  |
| `Evaluator.run_when_due` | a version at which an evaluation is due        | the trainer                            |
| `_report_regularly`      | the next version, at most a few seconds        | the trainer, the clock                 |
| `_answer_pauses`         | a pause with no rollout running                | rollouts that end                      |
| `WorkerPool._follow`     | a worker's next message                        | the worker, or its end                 |
| `_follow` (five streams) | the next record                                | trainer, preprocessor, launcher        |

Trainer and preprocessor wait for this process only for its data and for the answer to a pause, which depends on running
rollouts alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from pipelinerl.actor.budget import SampleBudget, lag_policy_of
from pipelinerl.actor.evaluator import (
    UNRECORDED,
    EvaluationRecorder,
    Evaluator,
    find_ended_rollouts,
    find_evaluations,
)
from pipelinerl.actor.groups import (
    INTERRUPTED,
    GroupRunner,
    Publisher,
    find_started_groups,
    find_unsettled_groups,
)
from pipelinerl.actor.membership import Membership
from pipelinerl.actor.problem_order import EpochCounter, ProblemOrder, evaluation_problems
from pipelinerl.actor.progress import Changes, ProgressWithoutTrainer, TrainingProgress
from pipelinerl.actor.scheduler import Scheduler, WorkerPool, worker_command
from pipelinerl.actor.stats import FailureLimit, RolloutAverages, Throughput
from pipelinerl.actor.worker_messages import rest_collector
from pipelinerl.config.schedule import EvaluationSchedule, pauses_rollouts
from pipelinerl.domains.user_task import ProblemSets, load_problem_sets
from pipelinerl.errors import UserError, WeightSyncError, WorkerError
from pipelinerl.records import (
    EvaluationResult,
    EvaluationRollout,
    FateRecord,
    Group,
    MetricRecord,
    PauseRequest,
    PoolAnswer,
    PoolChange,
    RolloutsPaused,
    TrainerMessage,
    record_time,
)
from pipelinerl.role import DEATH_FD_KEY, RoleContext, run_role
from pipelinerl.streams.base import (
    ACTOR_TOPIC,
    EVALUATION_ROLLOUTS_TOPIC,
    EVALUATION_TOPIC,
    FATES_TOPIC,
    LAUNCHER,
    METRICS_TOPIC,
    POOL_TOPIC,
    PREPROCESSOR,
    TRAINER,
    TRAINER_TOPIC,
    TURNS_TOPIC,
)
from pipelinerl.streams.hub import LoopWriter
from pipelinerl.weights.link import ControlClient, control_session

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 5.0
# Groups in the sliding window of rates, and rollouts from which on the failure rate counts.
_WINDOW_GROUPS, _LEAST_ROLLOUTS = 50, 32
_READ_TIMEOUT_S = 5.0
# An evaluation during training gets one slot in this many, unless actor.evaluation_concurrency is set.
_EVALUATION_SHARE = 4


class Actor:
    """The actor of one run, from the first weights to the last evaluation.

    Args:
        pool: of rollout workers, not started yet.
    """

    def __init__(self, context: RoleContext, problems: ProblemSets, pool: WorkerPool) -> None:
        config, name, hub, incarnation = context.config, context.job.name, context.streams, context.incarnation
        self.context = context
        self.config = config
        self.pool = pool
        self.changes = Changes()
        self.budget = SampleBudget(lag_policy_of(config), config.attempts)
        self.progress: TrainingProgress = (
            ProgressWithoutTrainer(config, self.budget, incarnation, self.changes)
            if not config.has_stage("finetune")
            else TrainingProgress(self.budget, incarnation, self.changes, config.finetune.last_step)
        )
        self.urls = {job.name: job.url for job in context.world.jobs_of("actor_llm") if job.url is not None}
        self.scheduler = Scheduler(
            len(self.urls),
            config.actor.llm_max_rollouts,
            pool,
            config.actor.rollout_timeout_s,
            config.actor.max_retries,
            self.changes,
        )
        self.membership = Membership(self.urls, self.scheduler, pool, context.token, incarnation)
        self.publisher = Publisher(
            source=name,
            incarnation=incarnation,
            groups=hub.loop_writer(ACTOR_TOPIC, name, Group, config.has_stage("preprocessor")),
            fates=hub.loop_writer(FATES_TOPIC, name, FateRecord),
            metrics=hub.loop_writer(METRICS_TOPIC, name, MetricRecord),
        )
        self.groups = GroupRunner(
            problems=ProblemOrder(problems.train, str(config.seed)),
            epochs=EpochCounter(len(problems.train)),
            attempts=config.attempts,
            seed=config.seed,
            incarnation=incarnation,
            scheduler=self.scheduler,
            progress=self.progress,
            publisher=self.publisher,
            failures=FailureLimit(config.actor.max_failure_rate, _LEAST_ROLLOUTS),
            throughput=Throughput(_WINDOW_GROUPS * config.attempts),
            averages=RolloutAverages(),
            heartbeat=context.heartbeat,
        )
        self.evaluator = Evaluator(
            problems=evaluation_problems(problems.test, config.actor.test_samples, str(config.seed), config.eval),
            seed=config.seed,
            incarnation=incarnation,
            scheduler=self.scheduler,
            progress=self.progress,
            results=hub.loop_writer(EVALUATION_TOPIC, name, EvaluationResult),
            # Opened with the first record: a failure costs records, not the actor.
            recorder=EvaluationRecorder(
                lambda: hub.loop_writer(EVALUATION_ROLLOUTS_TOPIC, name, EvaluationRollout),
                config.actor.recorded_test_samples,
            ),
            heartbeat=context.heartbeat,
            schedule=EvaluationSchedule(config.eval_every_n_versions, config.finetune.last_step),
            concurrency=config.actor.evaluation_concurrency or max(1, self.scheduler.total_slots // _EVALUATION_SHARE),
            holds_updates=pauses_rollouts(config) and config.world.colocated is not None,
        )
        self.pause_answers = hub.loop_writer(TURNS_TOPIC, name, RolloutsPaused) if pauses_rollouts(config) else None

    async def run(self) -> None:
        """Run until training is complete and the last evaluation is written.

        Raises:
            DomainError: user code returned something invalid.
            WorkerError: a rollout worker died, or too many rollouts failed.
            StreamError: a stream cannot be read or written.
        """
        try:
            async with asyncio.TaskGroup() as background:
                helpers = [
                    background.create_task(coroutine)
                    for coroutine in (
                        self._follow(TRAINER_TOPIC, TRAINER, TrainerMessage, self._on_trainer_message),
                        self._follow(FATES_TOPIC, PREPROCESSOR, FateRecord, self._on_fate),
                        self._follow(POOL_TOPIC, LAUNCHER, PoolChange, self.membership.apply_change),
                        self._follow(POOL_TOPIC, TRAINER, PoolAnswer, self.membership.apply_answer),
                        self._report_regularly(),
                    )
                ]
                if self.pause_answers is not None:
                    helpers += [
                        background.create_task(
                            self._follow(TURNS_TOPIC, TRAINER, PauseRequest, self._on_pause_request)
                        ),
                        background.create_task(self._answer_pauses(self.pause_answers)),
                    ]
                try:
                    await self.pool.start(background)
                    await self._begin()
                    await (self._evaluate() if self.config.debug.mode == "evaluation" else self._train())
                    await self._report()
                    for helper in helpers:
                        helper.cancel()
                finally:
                    await self.pool.close()
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors
        finally:
            async with AsyncExitStack() as writers:
                writers.push_async_callback(self.publisher.close)
                writers.push_async_callback(self.evaluator.results.close)
                writers.push_async_callback(self.evaluator.recorder.close)
                if self.pause_answers is not None:
                    writers.push_async_callback(self.pause_answers.close)

    async def _begin(self) -> None:
        """Wait until the servers have weights and the workers are ready."""
        context, progress = self.context, self.progress
        start_timeout_s = self.config.vllm_config.start_timeout_s
        if isinstance(progress, ProgressWithoutTrainer):
            with context.heartbeat.waiting("servers to start", start_timeout_s):
                await wait_for_servers(list(self.urls.values()), context.token, start_timeout_s)
            progress.serve_initial_weights()
        with context.heartbeat.waiting("the first weight update", start_timeout_s):
            await self.changes.wait_for(lambda: progress.version is not None)
        await self.membership.begin()

    async def _evaluate(self) -> None:
        """`debug.mode=evaluation`: evaluate the model of the servers and do nothing else."""
        streams, name = self.context.streams, self.context.job.name
        if not find_evaluations(streams, name):
            await self.evaluator.evaluate(0, known=find_ended_rollouts(streams, name))

    async def _train(self) -> None:
        context, progress, evaluator = self.context, self.progress, self.evaluator
        first_version = progress.current_version
        if context.incarnation > 0:
            await self._resume()
        made = find_evaluations(context.streams, context.job.name)
        if not made:
            logger.info("servers have version %d; evaluation before training", first_version)
            await evaluator.evaluate(first_version)
        evaluator.schedule.start_at(max((version for version, _ in made), default=first_version))

        self.groups.throughput.restart()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.groups.run())
            evaluations = tasks.create_task(evaluator.run_when_due())

        has_trainer = not isinstance(progress, ProgressWithoutTrainer)
        if has_trainer and (progress.current_version, True) not in made:
            await evaluator.run_final(evaluations.result())

    async def _resume(self) -> None:
        """After a restart, charge what is on its way to the trainer and repeat what was interrupted."""
        streams, name = self.context.streams, self.context.job.name
        started = find_started_groups(streams, name)
        for group_id, num_rollouts in started.open_groups.items():
            version = self.progress.current_version
            await self.publisher.write_fate("unused", group_id, INTERRUPTED, num_rollouts, version)
        # Nothing is awaited from here on, so that a step settles its groups either before or after all of this.
        version, steps_done = self.progress.current_version, self.progress.steps_done
        self.groups.epochs.resume(started.numbers_due, started.next_number)
        self.groups.numbers = itertools.chain(started.numbers_due, itertools.count(started.next_number))
        for group_id, sample_ids in find_unsettled_groups(streams, name, steps_done).items():
            self.budget.publish(group_id, sample_ids)
            self.progress.published(group_id, len(sample_ids), self.groups.epochs.epochs_done)
            for count in Counter(sample_id.rpartition("/")[0] for sample_id in sample_ids).values():
                self.budget.observe_rollout(count)
        logger.info(
            "restarted at version %d with %d samples in flight; %d groups restart",
            version,
            self.budget.charged_samples,
            len(started.numbers_due),
        )

    async def _follow(self, topic: str, instance: str, record_type: Any, apply: Callable[[Any], None]) -> None:
        """Apply every record of a stream on this event loop until cancelled. Reads block a thread of their own."""
        loop = asyncio.get_running_loop()
        reader = self.context.streams.reader(topic, instance, record_type)
        thread = ThreadPoolExecutor(1, f"stream-{topic}-{instance}")
        try:
            while True:
                for entry in await loop.run_in_executor(thread, reader.read, _READ_TIMEOUT_S):
                    apply(entry.record)
        finally:
            reader.wake()
            thread.shutdown()
            reader.close()

    def _on_trainer_message(self, message: TrainerMessage) -> None:
        self.progress.apply_message(message)
        if self.progress.version is not None:
            self.scheduler.weights_served(self.progress.version)
        self.context.heartbeat.progress()

    def _on_fate(self, fate: FateRecord) -> None:
        self.progress.apply_fate(fate)
        self.context.heartbeat.progress()

    def _on_pause_request(self, request: PauseRequest) -> None:
        if request.incarnation == self.context.incarnation:
            self.scheduler.pause(request.version)

    async def _answer_pauses(self, answers: LoopWriter[RolloutsPaused]) -> None:
        # Independent of the groups: the trainer that waits for this answer may be what makes room in their stream.
        while True:
            version = await self.scheduler.quiet.get()
            incarnation = self.context.incarnation
            await answers.write(RolloutsPaused(version=version, time=record_time(), incarnation=incarnation))
            await answers.flush()

    async def _report_regularly(self) -> None:
        """Write metrics at every new version and every few seconds in between."""
        reported: int | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_INTERVAL_S):
                    await self.changes.wait_for(lambda: self.progress.version != reported)  # noqa: B023
            reported = self.progress.version
            # Before the first weights the version is unknown: in a resumed run it is not 0.
            if reported is not None:
                await self._report()

    async def _report(self) -> None:
        """Write one metric record with everything since the last one."""
        failed = self.groups.failures.reasons
        values = {
            **self.groups.averages.take(),
            **self.groups.throughput.rates(),
            **self.scheduler.report(),
            **self.budget.policy.report(),
            **self.evaluator.report(),
            "actor/in_flight_samples": float(self.budget.running_samples),  #: of these, in groups being generated
            "actor/admitted_samples": float(self.budget.charged_samples),  #: admitted samples without a fate yet
            "actor/running_groups": float(self.groups.running_groups),  #: groups being generated
            #: worker processes replaced so far because user code blocked them
            "actor/replaced_workers": float(self.pool.replaced_workers),
            UNRECORDED: float(self.evaluator.recorder.unrecorded),
            "actor/failed_rollouts": float(failed.total()),  #: failed rollouts so far
            #: the same by reason
            **{f"actor/failed_{reason}": float(count) for reason, count in failed.items()},
        }
        await self.publisher.publish_metrics(values, self.progress.current_version)


async def wait_for_servers(urls: list[str], token: str, timeout_s: float) -> None:
    """Return when all servers are up.

    Raises:
        WorkerError: one of them did not come up in time.
    """
    async with control_session(token) as session:
        try:
            await asyncio.gather(*(ControlClient(session, url, url).wait_healthy(timeout_s) for url in urls))
        except WeightSyncError as error:
            raise WorkerError(f"the servers {', '.join(urls)} did not all start within {timeout_s:g} s") from error


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


def main(context: RoleContext) -> None:
    """Run the actor of `context`'s run."""
    with context.heartbeat.waiting("the dataset loader"):
        problems = load_problem_sets(context.config)
    death_fd = os.environ.get(DEATH_FD_KEY)
    pool = WorkerPool(
        worker_command(str(context.run_dir.root), context.job.name),
        context.job.workers,
        inherited_fds=[int(death_fd)] if death_fd else [],
    )

    async def run() -> None:
        await Actor(context, problems, pool).run()

    rest_collector()
    uvloop.run(run())


if __name__ == "__main__":
    sys.exit(run_role(main))
