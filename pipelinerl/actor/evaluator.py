"""Evaluations on held-out problems: when they run, what they ask, report and record.

Training waits for the first and the last evaluation of a run; the others run concurrently with it. Rollouts have
deadlines; failed ones are counted. With shared devices evaluations and weight updates wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from time import monotonic

from msgspec.structs import replace

from pipelinerl.actor.estimates import ALL_DATASETS, summarize
from pipelinerl.actor.problem_order import sample_seeds
from pipelinerl.actor.progress import TrainingProgress
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.worker_messages import (
    Answer,
    RolloutEnded,
    RolloutFailed,
    StartRollout,
)
from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.domains.user_task import Problem
from pipelinerl.errors import StreamError
from pipelinerl.records import EvaluationResult, EvaluationRollout, record_time
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.streams.base import EVALUATION_ROLLOUTS_TOPIC, EVALUATION_TOPIC
from pipelinerl.streams.hub import LoopWriter, StreamHub
from pipelinerl.streams.read import read_all

logger = logging.getLogger(__name__)

#: evaluation rollouts so far that could not be recorded (`actor.recorded_test_samples`)
UNRECORDED = "actor/unrecorded_test_samples"
MAX_CHARS = 4000


class EvaluationRecorder:
    """Writes what the model said in evaluations to the stream `evaluation_rollouts`, for people to read.

    A record that cannot be written is counted, with one warning; the run and the recording continue.

    Args:
        open_writer: opens the stream; called when there is something to write.
        limit: recorded rollouts per evaluation; None: all, 0: none.
    """

    def __init__(self, open_writer: Callable[[], LoopWriter[EvaluationRollout]], limit: int | None) -> None:
        self._open_writer = open_writer
        self._limit = limit
        self._writer: LoopWriter[EvaluationRollout] | None = None
        #: Rollouts of this start that could not be recorded.
        self.unrecorded = 0

    def places(self, count: int) -> frozenset[int]:
        """Return which of `count` rollouts are recorded: the same in every evaluation, spread evenly."""
        if self._limit is None or self._limit >= count:
            return frozenset(range(count))
        return frozenset(place * count // self._limit for place in range(self._limit))

    async def record(self, rollout: EvaluationRollout) -> None:
        """Write one rollout."""
        try:
            if self._writer is None:
                self._writer = self._open_writer()
            await self._writer.write(rollout)
        except StreamError as error:
            # Keep trying: a full disk may recover, and a bad value concerns one rollout.
            self.unrecorded += 1
            if self.unrecorded == 1:
                logger.warning(
                    "evaluation rollout %s is not recorded (%s counts them): %s", rollout.id, UNRECORDED, error
                )

    async def close(self) -> None:
        """Release the stream."""
        if self._writer is not None:
            with suppress(StreamError):
                await self._writer.close()


@dataclass
class Evaluator:
    """The evaluations of one run: one rollout for each of `problems`.

    Attributes:
        results: stream `evaluation`.
        concurrency: rollouts at a time while training runs.
        holds_updates: weight updates wait for evaluations because servers and trainer share devices.
    """

    problems: list[Problem]
    seed: int
    incarnation: int
    scheduler: Scheduler
    progress: TrainingProgress
    results: LoopWriter[EvaluationResult]
    recorder: EvaluationRecorder
    heartbeat: Heartbeat
    schedule: EvaluationSchedule
    concurrency: int
    holds_updates: bool = False
    _num_ended: int = field(default=0, init=False)

    async def run_when_due(self) -> list[EvaluationResult]:
        """Evaluate while training runs, and return the results of the last evaluation.

        An evaluation that is running when training ends is finished.
        """
        progress, results = self.progress, list[EvaluationResult]()
        due: int | None = None

        def is_due() -> bool:
            nonlocal due
            due = self.schedule.take_due(progress.current_version)
            return progress.done or due is not None

        while not progress.done:
            await progress.changes.wait_for(is_due)
            if due is not None and not progress.done:
                results = await self.evaluate(due, concurrency=self.concurrency)
        return results

    async def run_final(self, newest: Sequence[EvaluationResult]) -> None:
        """Evaluate the last version, unless `newest`, the last evaluation during training, already has."""
        version = self.progress.current_version
        if final := as_final(newest, version):
            logger.info("training is done at version %d, which was just evaluated", version)
            await self._write(final)
        else:
            logger.info("training is done at version %d; final evaluation", version)
            await self.evaluate(version, is_final=True)

    def report(self) -> dict[str, float]:
        """Return the progress of the newest evaluation."""
        return {
            "actor/evaluation_rollouts": float(self._num_ended),  #: rollouts of the newest evaluation that ended
            "actor/evaluation_size": float(len(self.problems)),  #: rollouts of one evaluation
        }

    async def evaluate(
        self,
        due_version: int,
        *,
        is_final: bool = False,
        concurrency: int | None = None,
        known: Mapping[int, Answer] = {},
    ) -> list[EvaluationResult]:
        """Run one evaluation, write its results and return them: see `summarize`. Empty without problems.

        Args:
            due_version: the version that it was due at.
            is_final: whether it is the one after training.
            concurrency: rollouts at a time; None: all slots.
            known: answers that need no rollout, by index into `problems`.
        """
        if not self.problems:
            return []
        async with self.scheduler.hold_updates() if self.holds_updates else nullcontext():
            results = await self._run(due_version, is_final, concurrency or self.scheduler.total_slots, known)
        await self._write(results)
        for result in results:
            if result.success_rate is None:
                logger.error("the evaluation of version %d failed: all rollouts failed", due_version)
                continue
            logger.info(
                "evaluation of version %d, %s: success %.3f, reward %.3f, %d rollouts (%d failed), %.1f s",
                due_version,
                result.dataset_name,
                result.success_rate,
                result.mean_reward,
                result.num_rollouts,
                result.num_failed,
                result.seconds,
            )
        return results

    async def _run(
        self, due_version: int, is_final: bool, concurrency: int, known: Mapping[int, Answer]
    ) -> list[EvaluationResult]:
        started, first_version = monotonic(), self.progress.current_version
        places = asyncio.Semaphore(concurrency)
        recorded = self.recorder.places(len(self.problems))
        seeds = sample_seeds(self.seed, self.problems)
        self._num_ended = len(known)
        # If passes end training, another evaluation may have been due at the final version.
        group_id = f"evaluation-{self.incarnation}-{due_version}{'-final' if is_final else ''}"

        async def run_attempt(index: int, problem: Problem) -> Answer:
            if index in known:
                return known[index]
            rollout = StartRollout(
                rollout_id=f"{group_id}/r{index}",
                group_id=group_id,
                problem=problem.data,
                seed=seeds[index],
                evaluation=True,
                evaluation_set=problem.evaluation_set,
                record=index in recorded,
            )
            async with places:
                answer = await self.scheduler.run(rollout)
            self.heartbeat.progress()
            self._num_ended += 1
            if isinstance(answer, RolloutEnded):
                self.progress.budget.observe_rollout(answer.summary.num_samples)
            if rollout.record:
                record = rollout_record(rollout, problem, answer, due_version, is_final, self.incarnation)
                await self.recorder.record(record)
            return answer

        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(run_attempt(index, problem)) for index, problem in enumerate(self.problems)]
        template = EvaluationResult(
            due_version=due_version,
            min_version=first_version,
            max_version=self.progress.current_version,
            is_final=is_final,
            dataset_name=ALL_DATASETS,
            num_rollouts=0,
            num_failed=0,
            success_rate=None,
            mean_reward=None,
            metrics={},
            seconds=monotonic() - started,
            time=record_time(),
            incarnation=self.incarnation,
        )
        return summarize(self.problems, [task.result() for task in tasks], template)

    async def _write(self, results: Sequence[EvaluationResult]) -> None:
        for result in results:
            await self.results.write(result)
        await self.results.flush()


def as_final(newest: Sequence[EvaluationResult], version: int) -> list[EvaluationResult]:
    """Return the newest evaluation as the final one; empty if another is needed.

    If passes over the problems end training, the last version is not known in advance and may just have been evaluated
    with the same problems and seeds.
    """
    if any(not result.due_version == result.min_version == result.max_version == version for result in newest):
        return []
    if any(result.success_rate is None for result in newest):
        return []
    return [replace(result, is_final=True) for result in newest]


def rollout_record(
    rollout: StartRollout, problem: Problem, answer: Answer, due_version: int, is_final: bool, incarnation: int
) -> EvaluationRollout:
    """Return the record of `rollout`, which ended with `answer`. Long problems and messages are truncated."""
    ended = answer if isinstance(answer, RolloutEnded) else None
    failed = answer if isinstance(answer, RolloutFailed) else None
    return EvaluationRollout(
        id=rollout.rollout_id,
        group_id=rollout.group_id,
        problem_id=problem.id,
        dataset_name=(ended.dataset_name if ended else None) or problem.dataset_name,
        problem=_problem_text(problem),
        due_version=due_version,
        is_final=is_final,
        samples=ended.recorded if ended else [],
        summary=ended.summary if ended else None,
        min_version=ended.min_version if ended else None,
        max_version=ended.max_version if ended else None,
        failure=failed.reason if failed else "",
        # The end names the line of user code.
        message=failed.message[-MAX_CHARS:] if failed else "",
        incarnation=incarnation,
    )


def _problem_text(problem: Problem) -> str:
    text = json.dumps(problem.data, ensure_ascii=False, default=str, skipkeys=True)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}...({len(text) - MAX_CHARS} characters cut)"


def find_evaluations(streams: StreamHub, actor: str) -> set[tuple[int, bool]]:
    """Return (due version, is final) of every evaluation with at least one rollout that did not fail."""
    return {
        (evaluation.due_version, evaluation.is_final)
        for evaluation in read_all(streams, EVALUATION_TOPIC, actor, EvaluationResult)
        if evaluation.success_rate is not None
    }


def find_ended_rollouts(streams: StreamHub, actor: str) -> dict[int, RolloutEnded]:
    """Return the recorded rollouts of an interrupted evaluation by index of their problem. Failed ones are repeated."""
    ended: dict[int, RolloutEnded] = {}
    for record in read_all(streams, EVALUATION_ROLLOUTS_TOPIC, actor, EvaluationRollout):
        if record.summary is not None:
            versions = (record.min_version, record.max_version)
            ended[int(record.id.rpartition("/r")[2])] = RolloutEnded(
                0, [], record.summary, record.dataset_name, *versions, requests=0, retries=0
            )
    return ended
