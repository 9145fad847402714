"""The actor's parts and how they hang together. Called once by the actor's loop; waits for nothing."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from pipelinerl.actor.admission import SampleBudget
from pipelinerl.actor.alone import AloneTrainer
from pipelinerl.actor.drain_requests import DrainAnswers
from pipelinerl.actor.evaluation import Evaluator
from pipelinerl.actor.evaluation_record import UNRECORDED, EvaluationRecorder
from pipelinerl.actor.failures import FailureLimit
from pipelinerl.actor.frames import RolloutEnded
from pipelinerl.actor.gate import RolloutGate
from pipelinerl.actor.groups import Answer
from pipelinerl.actor.membership import ServerMembership
from pipelinerl.actor.passes import Passes
from pipelinerl.actor.pool import WorkerPool
from pipelinerl.actor.problems import ProblemOrder, evaluation_problems
from pipelinerl.actor.publish import Publisher
from pipelinerl.actor.round_budget import RoundBudget
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.actor.stats import RolloutAverages, ThroughputWindow
from pipelinerl.actor.trainer_state import TrainerState
from pipelinerl.actor.training import TrainingRollouts
from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import EvaluationSchedule, pauses_rollouts, rounds_of
from pipelinerl.config.stages import has_stage
from pipelinerl.domains.problem_sets import Problem, ProblemSets
from pipelinerl.records import EvaluationResult, EvaluationRollout, FateRecord, Group, MetricRecord, RolloutsPaused
from pipelinerl.role import RoleContext
from pipelinerl.streams.base import (
    ACTOR_TOPIC,
    EVALUATION_ROLLOUTS_TOPIC,
    EVALUATION_TOPIC,
    FATES_TOPIC,
    METRICS_TOPIC,
    TURNS_TOPIC,
)
from pipelinerl.streams.hub import StreamHub

logger = logging.getLogger(__name__)

# Share of the slots that an evaluation beside training may take, if actor.evaluation_concurrency does not say.
_EVALUATION_SHARE = 4


@dataclass
class ActorParts:
    """Everything that the actor's loops use."""

    server_urls: list[str]
    pool: WorkerPool
    members: ServerMembership
    alone: AloneTrainer | None
    budget: SampleBudget
    trainer: TrainerState
    slots: ServerSlots
    scheduler: Scheduler
    training: TrainingRollouts
    evaluator: Evaluator
    recorder: EvaluationRecorder
    evaluations: EvaluationSchedule
    evaluation_concurrency: int
    throughput: ThroughputWindow
    averages: RolloutAverages
    failures: FailureLimit
    publisher: Publisher
    report_interval_s: float
    gate: RolloutGate | None
    answers: DrainAnswers | None
    evaluations_pass_gate: bool

    async def report(self) -> None:
        """Write one metric record with everything since the last one."""
        values = {
            **self.averages.take(),
            **self.throughput.rates(),
            "actor/in_flight_samples": float(self.budget.running_samples),
            "actor/admitted_samples": float(self.budget.charged_samples),
            "actor/running_groups": float(self.training.running_groups),
            "actor/failed_rollouts": float(self.failures.total),
            "actor/retries": float(self.scheduler.retries),
            "actor/replaced_workers": float(self.pool.replaced_workers),
            UNRECORDED: float(self.recorder.unrecorded),
            **{f"actor/server_busy_{index}": float(busy) for index, busy in enumerate(self.slots.busy)},
            **self.slots.occupancy.take(),
            **{f"actor/failed_{reason}": float(count) for reason, count in self.failures.reasons.items()},
        }
        await self.publisher.publish_metrics(values, self.trainer.current_version)


def assemble(context: RoleContext, problems: ProblemSets, pool: WorkerPool) -> ActorParts:
    """Build the actor of this run."""
    config, incarnation = context.config, context.incarnation
    name = context.job.name
    urls = {job.name: job.url for job in context.world.jobs_of("actor_llm") if job.url is not None}
    hub = context.streams
    budget = _budget_of(config)
    answers = (
        DrainAnswers(hub.loop_writer(TURNS_TOPIC, name, RolloutsPaused), incarnation)
        if pauses_rollouts(config)
        else None
    )
    gate = None if answers is None else RolloutGate(answers.put)
    trainer = TrainerState(budget, incarnation, gate)
    slots = ServerSlots(len(urls), config.actor.llm_max_rollouts, on_idle=trainer.notify)
    scheduler = Scheduler(slots, pool, config.actor.rollout_timeout_s, config.actor.max_retries, gate)
    throughput = ThroughputWindow(config.actor.throughput_window_size * config.attempts, time.monotonic)
    averages = RolloutAverages()
    failures = FailureLimit(config.actor.max_failure_rate, config.actor.min_rollouts_for_failure_rate)
    publisher = _publisher_of(hub, name, incarnation, has_stage(config, "preprocessor"))

    def on_training_answer(answer: Answer, problem: Problem) -> None:
        context.heartbeat.progress()
        tokens = answer.summary.output_tokens if isinstance(answer, RolloutEnded) else 0
        throughput.add(tokens, answer.requests)
        if isinstance(answer, RolloutEnded):
            averages.add(answer.summary, answer.dataset_name or problem.dataset_name)

    def on_evaluation_answer(answer: Answer) -> None:
        context.heartbeat.progress()
        if isinstance(answer, RolloutEnded):
            budget.observe_rollout(answer.summary.num_samples)

    passes = Passes(len(problems.train))
    alone = AloneTrainer(config, budget, trainer, passes) if config.debug.mode == "actor" else None
    training = TrainingRollouts(
        problems=ProblemOrder(problems.train, str(config.seed)),
        passes=passes,
        attempts=config.attempts,
        seed=config.seed,
        incarnation=incarnation,
        scheduler=scheduler,
        slots=slots,
        budget=budget,
        failures=failures,
        trainer=trainer,
        publisher=publisher,
        on_answer=on_training_answer,
        on_published=alone.published if alone is not None else None,
    )
    recorder = _recorder_of(hub, name, incarnation, config.actor.recorded_test_samples)
    evaluator = Evaluator(
        scheduler=scheduler,
        problems=evaluation_problems(problems.test, config.actor.test_samples, str(config.seed)),
        seed=config.seed,
        incarnation=incarnation,
        on_answer=on_evaluation_answer,
        recorder=recorder,
    )
    return ActorParts(
        server_urls=list(urls.values()),
        alone=alone,
        pool=pool,
        members=ServerMembership(urls, slots, pool, context.token, incarnation),
        budget=budget,
        trainer=trainer,
        slots=slots,
        scheduler=scheduler,
        training=training,
        evaluator=evaluator,
        recorder=recorder,
        evaluations=EvaluationSchedule(config.eval_every_n_versions, config.finetune.last_step),
        evaluation_concurrency=config.actor.evaluation_concurrency or max(1, slots.total // _EVALUATION_SHARE),
        throughput=throughput,
        averages=averages,
        failures=failures,
        publisher=publisher,
        report_interval_s=config.actor.log_each_n_secs,
        gate=gate,
        answers=answers,
        evaluations_pass_gate=config.world.placement == "colocated",
    )


def _recorder_of(hub: StreamHub, name: str, incarnation: int, limit: int | None) -> EvaluationRecorder:
    """The stream is opened with the first record: one that cannot be written costs records, not the actor."""
    return EvaluationRecorder(
        lambda: hub.loop_writer(EVALUATION_ROLLOUTS_TOPIC, name, EvaluationRollout), limit, incarnation
    )


def _budget_of(config: RunConfig) -> SampleBudget | RoundBudget:
    rounds = rounds_of(config)
    if rounds is not None:
        return RoundBudget(rounds, config.attempts)
    return SampleBudget(config.finetune.samples_per_step, config.max_lag, config.attempts)


def _publisher_of(hub: StreamHub, name: str, incarnation: int, has_preprocessor: bool) -> Publisher:
    return Publisher(
        source=name,
        incarnation=incarnation,
        groups=hub.loop_writer(ACTOR_TOPIC, name, Group, has_preprocessor),
        fates=hub.loop_writer(FATES_TOPIC, name, FateRecord),
        evaluations=hub.loop_writer(EVALUATION_TOPIC, name, EvaluationResult),
        metrics=hub.loop_writer(METRICS_TOPIC, name, MetricRecord),
    )
