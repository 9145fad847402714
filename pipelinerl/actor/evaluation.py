"""Evaluations on the held-out problems: running one, and summing it up.

Called by the actor before training, beside it, and after it. Waits for the rollouts; a failing one is counted, it does
not end training.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipelinerl.actor.evaluation_record import EvaluationRecorder
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed
from pipelinerl.actor.problems import rollout_seed
from pipelinerl.actor.scheduler import Attempt, Scheduler
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.records import EvaluationResult

Answer = RolloutEnded | RolloutFailed
ALL_DATASETS = "all"


@dataclass
class Evaluator:
    """Runs evaluations of `problems` (one rollout each) with at most `concurrency` rollouts at a time.

    Args:
        recorder: is told how rollouts ended, before the result of their evaluation is known; None: nobody is.
    """

    scheduler: Scheduler
    problems: list[Problem]
    seed: int
    incarnation: int
    on_answer: Callable[[Answer], None]
    recorder: EvaluationRecorder | None = None
    clock: Callable[[], float] = field(default=time.monotonic)

    async def run(
        self, due_version: int, current_version: Callable[[], int], is_final: bool, concurrency: int
    ) -> list[EvaluationResult]:
        """Return one result for all data sets together, followed by one for each if there are several.

        When no rollout came to an end there is one, without averages.
        """
        started = self.clock()
        first_version = current_version()
        places = asyncio.Semaphore(concurrency)
        recorder = self.recorder
        recorded = recorder.places(len(self.problems)) if recorder is not None else frozenset()
        # Where passes end training, one may have been due at the last version before the final one.
        group_id = f"evaluation-{self.incarnation}-{due_version}{'-final' if is_final else ''}"

        async def attempt(index: int, problem: Problem) -> Answer:
            asked = Attempt(
                rollout_id=f"{group_id}/r{index}",
                group_id=group_id,
                problem=problem,
                # The same seeds in every evaluation: two of them differ by the weights only.
                seed=rollout_seed(self.seed, "evaluation", index),
                evaluation=True,
                record=index in recorded,
            )
            async with places:
                answer = await self.scheduler.run(asked)
            self.on_answer(answer)
            if recorder is not None and asked.record:
                await recorder.record(asked, answer, due_version, is_final)
            return answer

        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(attempt(index, problem)) for index, problem in enumerate(self.problems)]
        answers = [task.result() for task in tasks]
        if recorder is not None:
            await recorder.flush()
        return summarize_evaluation(
            self.problems,
            answers,
            EvaluationFrame(
                due_version=due_version,
                versions=(first_version, current_version()),
                is_final=is_final,
                seconds=self.clock() - started,
                incarnation=self.incarnation,
            ),
        )


def as_final(newest: Sequence[EvaluationResult], version: int) -> list[EvaluationResult]:
    """The newest evaluation as the final one; empty: another one has to be made.

    Where passes over the problems end training, the last version is not known before, and an evaluation may have been
    due at it. The final one would ask the same problems with the same seeds once more.

    Args:
        newest: results of the newest evaluation beside training, if there was one.
        version: the last one of the run.
    """
    if any(not result.due_version == result.min_version == result.max_version == version for result in newest):
        return []
    if any(result.success_rate is None for result in newest):
        return []
    return [replace(result, is_final=True) for result in newest]


@dataclass(frozen=True, slots=True)
class EvaluationFrame:
    """What is the same for all results of one evaluation; `versions` were current at its start and end."""

    due_version: int
    versions: tuple[int, int]
    is_final: bool
    seconds: float
    incarnation: int


def summarize_evaluation(
    problems: list[Problem], answers: list[Answer], frame: EvaluationFrame
) -> list[EvaluationResult]:
    """Average the rollouts that came to an end; failed ones are counted and do not enter the averages.

    Data sets in which all failed are left out. Without any that did not, one result says that this evaluation is over:
    who waits for its value must not take it for one that still runs.
    """
    by_name: dict[str, list[Answer]] = defaultdict(list)
    for problem, answer in zip(problems, answers, strict=True):
        own_name = answer.dataset_name if isinstance(answer, RolloutEnded) else None
        by_name[own_name or problem.dataset_name].append(answer)
    results = []
    if len(by_name) > 1:
        results.append(_result(ALL_DATASETS, answers, frame))
    results.extend(_result(name, own, frame) for name, own in sorted(by_name.items()))
    return [result for result in results if result.success_rate is not None] or results[:1]


def _result(dataset_name: str, answers: list[Answer], frame: EvaluationFrame) -> EvaluationResult:
    ended = [answer for answer in answers if isinstance(answer, RolloutEnded)]
    versions = [version for answer in ended for version in (answer.min_version, answer.max_version)]
    known = [version for version in versions if version is not None] or list(frame.versions)
    metrics: dict[str, list[float]] = defaultdict(list)
    for answer in ended:
        for name, value in answer.summary.metrics.items():
            metrics[name].append(value)
    return EvaluationResult(
        due_version=frame.due_version,
        min_version=min(known),
        max_version=max(known),
        is_final=frame.is_final,
        dataset_name=dataset_name,
        num_rollouts=len(answers),
        num_failed=len(answers) - len(ended),
        success_rate=_mean([answer.summary.success for answer in ended]),
        mean_reward=_mean([answer.summary.reward for answer in ended]),
        metrics={name: math.fsum(values) / len(values) for name, values in sorted(metrics.items())},
        seconds=frame.seconds,
        time=time.time(),
        incarnation=frame.incarnation,
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
