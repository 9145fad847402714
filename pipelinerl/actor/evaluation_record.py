"""Records rollouts of evaluations, so that people can read what the model said on held-out problems.

Called by the evaluator when a rollout ends. Waits for the stream only, which has no reader that it could wait for. A
record that cannot be written is a warning and is counted: it ends neither the run nor the recording of others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelinerl.actor.frames import RolloutEnded, RolloutFailed
from pipelinerl.actor.scheduler import Attempt
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.errors import StreamError
from pipelinerl.records import EvaluationRollout
from pipelinerl.streams.hub import LoopWriter

logger = logging.getLogger(__name__)

KEY = "actor.recorded_test_samples"
#: The metric that counts what could not be written.
UNRECORDED = "actor/unrecorded_test_samples"
MAX_CHARS = 4000


@dataclass
class EvaluationRecorder:
    """Writes to the stream `evaluation_rollouts`.

    Args:
        open_writer: opens the stream. Not called before there is something to write.
        limit: rollouts of each evaluation that are recorded; None: all, 0: none.
        incarnation: of the run.
    """

    open_writer: Callable[[], LoopWriter[EvaluationRollout]]
    limit: int | None
    incarnation: int
    _writer: LoopWriter[EvaluationRollout] | None = field(default=None, init=False)
    #: Rollouts of this start that should have been recorded and could not be.
    unrecorded: int = field(default=0, init=False)
    _said: bool = field(default=False, init=False)

    def places(self, count: int) -> frozenset[int]:
        """Which of `count` rollouts are recorded: the same ones in every evaluation, evenly spread over all."""
        if self.limit is None or self.limit >= count:
            return frozenset(range(count))
        return frozenset(place * count // self.limit for place in range(self.limit))

    async def record(
        self, attempt: Attempt, answer: RolloutEnded | RolloutFailed, due_version: int, is_final: bool
    ) -> None:
        """Write how one attempt ended. Never raises for a record or a stream that cannot be written."""
        try:
            if self._writer is None:
                self._writer = self.open_writer()
            await self._writer.write(rollout_record(attempt, answer, due_version, is_final, self.incarnation))
        except StreamError as error:
            # The next one is tried all the same: a disk gets room again, and a value is of one rollout.
            self.unrecorded += 1
            self._say_once(f"rollout {attempt.rollout_id} is not recorded; it counts in their averages", error)

    async def flush(self) -> None:
        """As durable as `streams.fsync` asks for."""
        if self._writer is None:
            return
        try:
            await self._writer.flush()
        except StreamError as error:
            self._say_once("recorded rollouts may not survive a crash of the machine", error)

    async def close(self) -> None:
        """Release the stream, and say how many rollouts are not in it."""
        if self.unrecorded > 1:
            logger.warning("%d rollouts of evaluations were not recorded in this start of the run", self.unrecorded)
        if self._writer is None:
            return
        try:
            await self._writer.close()
        except StreamError as error:
            self._say_once("recorded rollouts may not survive a crash of the machine", error)

    def _say_once(self, what: str, error: StreamError) -> None:
        if self._said:
            return
        self._said = True
        logger.warning(
            "evaluations: %s. From now on those that are not recorded are counted only (%s); %s=0 never records any. "
            "The reason: %s",
            what,
            UNRECORDED,
            KEY,
            error,
        )


def rollout_record(
    attempt: Attempt, answer: RolloutEnded | RolloutFailed, due_version: int, is_final: bool, incarnation: int
) -> EvaluationRollout:
    """The record of `attempt`, which ended with `answer`."""
    problem = attempt.problem
    ended = answer if isinstance(answer, RolloutEnded) else None
    failed = answer if isinstance(answer, RolloutFailed) else None
    return EvaluationRollout(
        id=attempt.rollout_id,
        group_id=attempt.group_id,
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
        # The end of a traceback says what went wrong.
        message=failed.message[-MAX_CHARS:] if failed else "",
        incarnation=incarnation,
    )


def _problem_text(problem: Problem) -> str:
    try:
        text = json.dumps(problem.data, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(problem.data)  # keys that are no text
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}...({len(text) - MAX_CHARS} characters cut)"
