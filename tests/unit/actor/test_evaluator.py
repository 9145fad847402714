"""Evaluations: when they are due, what they report, what is recorded, and that none of it can end a run (O2)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakes.made_up_rollouts import PROBLEM, InstantRollouts, ended, settle
from fakes.short_sample import evaluation_result
from msgspec.structs import replace

from pipelinerl.actor.budget import LagPolicy, SampleBudget
from pipelinerl.actor.evaluator import EvaluationRecorder, Evaluator, as_final, summarize
from pipelinerl.actor.progress import Changes, TrainingProgress
from pipelinerl.actor.scheduler import Scheduler
from pipelinerl.actor.worker import RolloutWorker
from pipelinerl.actor.worker_messages import (
    Answer,
    RolloutEnded,
    RolloutFailed,
    StartRollout,
    check_sendable,
)
from pipelinerl.config.resources import FileStreams
from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.domains.user_task import Problem
from pipelinerl.errors import RolloutError, StreamError
from pipelinerl.llm.sample_builder import recorded_samples
from pipelinerl.records import EvaluationResult, EvaluationRollout, RolloutSummary, VersionSpan
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import LoopWriter, StreamHub


def text(**fields: Any) -> TrainingText:
    values: dict[str, Any] = {
        "text": "2+2?4",
        "n_predicted": 1,
        "input_ids": [7, 8, 9],
        "labels": [-100, -100, 9],
        "prompt_tokens": 2,
        "output_tokens": 1,
        "finished": True,
    }
    return TrainingText(**{**values, **fields})


def recorded(*texts: TrainingText, reward: float = 0.25) -> list[Any]:
    return recorded_samples(list(texts), group_id="g", rollout_id="g/r0", incarnation=2, reward=reward)


def test_texts_are_recorded_as_they_are_without_what_training_needs() -> None:
    """Greedy, without a reward, versions and log-probs: training would refuse it."""
    (sample,) = recorded(text(temperature=0.0, logprobs=[math.nan]))
    assert (sample.id, sample.input_ids, sample.labels, sample.logprobs) == ("g/r0/s0", [7, 8, 9], [-100, -100, 9], [])
    assert (sample.reward, sample.temperature, sample.finish_reason) == (0.25, 0.0, "stop")
    assert (sample.prompt_text, sample.output_text, sample.incarnation) == ("", "", 2)
    spans = recorded(text(version_spans=[(3, 0, 1)], reward=1.0))[0]
    assert (spans.version_spans, spans.reward) == ([VersionSpan(3, 0, 1)], 1.0)
    bare = recorded(text(input_ids=[], labels=[], finished=False))[0]
    assert (bare.prompt_text, bare.output_text, bare.finish_reason) == ("2+2?", "4", "length")


def recorder_of(limit: int | None, open_writer: Any = None) -> EvaluationRecorder:
    return EvaluationRecorder(open_writer or (lambda: pytest.fail("nothing is to be written")), limit)


@pytest.mark.parametrize(
    ("limit", "count", "places"),
    [(None, 3, {0, 1, 2}), (5, 3, {0, 1, 2}), (0, 3, set()), (3, 10, {0, 3, 6}), (2, 4, {0, 2}), (4, 0, set())],
)
def test_the_recorded_ones_are_spread_over_all(limit: int | None, count: int, places: set[int]) -> None:
    assert recorder_of(limit).places(count) == places


def answer_to(start: StartRollout) -> Answer:
    if start.problem["n"] == 0:
        return RolloutFailed(0, "exception_ValueError", "x" * 9000 + "the end")
    summary = RolloutSummary(
        rollout_id=start.rollout_id, reward=1.0, success=True, num_samples=1, output_tokens=1, latency_s=0.1
    )
    samples = recorded_samples(
        [text()], group_id=start.group_id, rollout_id=start.rollout_id, incarnation=1, reward=1.0
    )
    return RolloutEnded(0, [], summary, None, 4, 5, 1, 0, recorded=samples if start.record else [])


def test_what_cannot_be_recorded_never_costs_the_rollout() -> None:
    start = StartRollout(
        ticket=1, rollout_id="e/r1", group_id="e", problem={"n": 1}, server=0, seed=0, evaluation=True, record=True
    )
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._incarnation = 1
    metrics = BaseMetrics(reward=1, success=True)
    (sample,) = worker._recorded(start, RolloutResult([text()], metrics))
    assert (sample.id, sample.input_ids) == ("e/r1/s0", [7, 8, 9])
    assert worker._recorded(start, RolloutResult([text(version_spans=[("v3", 0, 1)])], metrics)) == []
    with pytest.raises(RolloutError) as refused:
        check_sendable(replace(ended(), dataset_name="\ud800"))
    assert refused.value.reason == "bad_value"


class Odd(RolloutError):
    def __str__(self) -> str:
        raise LookupError("no text")


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (RolloutError(None, "x"), "None", "None: x"),  # type: ignore[arg-type]
        (RolloutError(7), "7", "7"),  # type: ignore[arg-type]
        (Odd("late"), "late", "<Odd without a text>"),
    ],
)
def test_o2_an_exception_of_the_users_without_a_text_costs_its_rollout(
    error: RolloutError, reason: str, message: str
) -> None:
    """What `_failed` raises would end the worker, and the run with it."""
    llm: Any = SimpleNamespace(counters=SimpleNamespace(requests=2, retries=1))
    start: Any = SimpleNamespace(ticket=4, rollout_id="e/r1")
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._function = print  # type: ignore[assignment]
    assert worker._failed(start, llm, error) == RolloutFailed(4, reason, message, requests=2, retries=1)


def evaluator_of(recorder: EvaluationRecorder) -> tuple[Evaluator, InstantRollouts, list[Any]]:
    """An evaluator at version 4, its rollouts, and the list of what it writes."""
    runner, changes, written = InstantRollouts(answer_to), Changes(), list[Any]()

    async def write(record: Any) -> None:
        written.append(record)

    async def flush() -> None:
        """Nothing is kept back."""

    progress = TrainingProgress(SampleBudget(LagPolicy(), 2), 1, changes)
    progress.version = 4
    evaluator = Evaluator(
        problems=[Problem(id=f"p{n}", dataset_name="test", data={"n": n}) for n in range(4)],
        seed=3,
        incarnation=1,
        scheduler=Scheduler(1, 4, runner, 10, 0, changes),
        progress=progress,
        results=SimpleNamespace(write=write, flush=flush),  # type: ignore[arg-type]
        recorder=recorder,
        heartbeat=SimpleNamespace(progress=lambda: None),  # type: ignore[arg-type]
        schedule=EvaluationSchedule(1),
        concurrency=2,
        holds_updates=True,
    )
    return evaluator, runner, written


async def evaluate(recorder: EvaluationRecorder, is_final: bool = False) -> tuple[InstantRollouts, list[Any]]:
    evaluator, runner, written = evaluator_of(recorder)
    results = await evaluator.evaluate(4, is_final=is_final)
    assert written == results
    return runner, results


@pytest.mark.parametrize("was_just_evaluated", [False, True])
async def test_evaluations_next_to_training_and_the_final_one(was_just_evaluated: bool) -> None:
    evaluator, runner, written = evaluator_of(recorder_of(0))
    progress = evaluator.progress
    evaluator.schedule.start_at(4)
    running = asyncio.create_task(evaluator.run_when_due())
    await settle()
    assert not written
    for version in (5, 7):
        progress.version = version
        progress.changes.notify()
        await settle()
    assert [(result.due_version, result.is_final) for result in written] == [(5, False), (7, False)]
    progress.done = True
    progress.changes.notify()
    newest = await running
    assert newest == written[1:] and len(runner.starts) == 8
    if was_just_evaluated:
        newest = [replace(result, min_version=7, max_version=7) for result in newest]
    await evaluator.run_final(newest)
    assert (written[-1].due_version, written[-1].is_final) == (7, True)
    assert len(runner.starts) == (8 if was_just_evaluated else 12)
    evaluator.problems = []
    await evaluator.run_final([])
    assert len(written) == 3


@pytest.mark.parametrize("is_final", [False, True])
async def test_an_evaluation_writes_what_was_chosen_also_what_failed(tmp_path: Path, is_final: bool) -> None:
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run")
    recorder = recorder_of(2, lambda: hub.loop_writer("evaluation_rollouts", "actor_0", EvaluationRollout))
    runner, results = await evaluate(recorder, is_final)
    await recorder.close()
    assert [start.record for start in runner.starts] == [True, False, True, False]
    reader = hub.reader("evaluation_rollouts", "actor_0", EvaluationRollout)
    failed, won = (entry.record for entry in reader.read(timeout_s=0))
    name = "evaluation-1-4-final" if is_final else "evaluation-1-4"
    assert (failed.id, failed.failure, failed.summary) == (f"{name}/r0", "exception_ValueError", None)
    assert len(failed.message) == 4000 and failed.message.endswith("the end")
    assert (won.id, won.problem_id, won.group_id, won.dataset_name) == (f"{name}/r2", "p2", name, "test")
    assert (json.loads(won.problem), won.due_version, won.is_final) == ({"n": 2}, 4, is_final)
    assert (won.min_version, won.max_version, won.incarnation) == (4, 5, 1)
    assert won.samples[0].input_ids == [7, 8, 9] and won.summary is not None and won.summary.reward == 1.0
    assert (results[0].num_rollouts, results[0].num_failed) == (4, 1)


async def test_k_samples_of_a_problem_have_their_own_seeds_and_are_told_how_to_sample() -> None:
    evaluator, runner, _ = evaluator_of(recorder_of(0))
    own = replace(evaluator.problems[1], evaluation_set=2)
    evaluator.problems = [evaluator.problems[3], own, own]
    (result,) = await evaluator.evaluate(4)
    assert [(start.evaluation_set, start.problem["n"]) for start in runner.starts] == [(0, 3), (2, 1), (2, 1)]
    assert len({start.seed for start in runner.starts}) == 3
    assert (result.num_problems, result.attempts, result.num_rollouts) == (2, 1, 3)
    assert result.estimates["avg_at_1"].value == 1.0


@pytest.mark.parametrize("fails_at", ["open", "write"])
async def test_o2_a_record_that_cannot_be_written_costs_this_one_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails_at: str
) -> None:
    """A disk that is full for a moment, or one value that nothing can hold."""
    hub = StreamHub(FileStreams(), RunDir(tmp_path), "run")
    faults = [StreamError("stream x: No space left on device")]

    def once(moment: str) -> None:
        if moment == fails_at and faults:
            raise faults.pop()

    class Full:
        def __init__(self) -> None:
            once("open")
            self._writer = hub.writer("evaluation_rollouts", "actor_0", EvaluationRollout)

        def write(self, record: Any) -> int:
            once("write")
            return self._writer.write(record)

        def flush(self) -> None:
            self._writer.flush()

        def close(self) -> None:
            self._writer.close()

        end_waits = lambda self: None  # noqa: E731

    recorder = recorder_of(None, lambda: LoopWriter(Full(), may_wait=False))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        await evaluate(recorder)
        await evaluate(recorder, is_final=True)
        await recorder.close()
    reader = hub.reader("evaluation_rollouts", "actor_0", EvaluationRollout)
    assert len(reader.read(timeout_s=0)) == 7 and recorder.unrecorded == 1
    assert len(caplog.messages) == 1


def test_o2_evaluations_are_due_once_also_when_versions_jump() -> None:
    schedule = EvaluationSchedule(every_n_versions=10)
    due = [schedule.take_due(version) for version in (0, 9, 10, 11, 35, 36, 40)]
    assert due == [None, None, 10, None, 30, None, 40]
    assert EvaluationSchedule(0).take_due(100) is None
    schedule = EvaluationSchedule(10)
    schedule.start_at(25)
    assert (schedule.take_due(29), schedule.take_due(30)) == (None, 30)
    # The final evaluation measures the last version.
    schedule = EvaluationSchedule(10, last_version=30)
    assert [schedule.take_due(version) for version in (10, 21, 30)] == [10, 20, None]


TEMPLATE = evaluation_result(4, max_version=6)


def test_an_evaluation_averages_what_came_to_an_end() -> None:
    problems = [PROBLEM] * 3
    (result,) = summarize(
        problems, [ended(reward=1.0, versions=(4, 5), n=1), RolloutFailed(0, "x", ""), ended(reward=0.0, n=2)], TEMPLATE
    )
    assert (result.num_rollouts, result.num_failed, result.success_rate, result.mean_reward) == (3, 1, 0.5, 0.5)
    assert (result.due_version, result.min_version, result.max_version) == (4, 3, 5)
    assert result.metrics == {"n": 1.5} and result.dataset_name == "train"


@pytest.mark.parametrize(
    ("due", "spans", "is_final"),
    [(6, (6, 6), True), (6, (6, 7), False), (6, (5, 6), False), (5, (5, 5), False), (5, (6, 6), False)],
)
def test_o2_an_evaluation_of_the_last_version_is_the_final_one(
    due: int, spans: tuple[int, int], is_final: bool
) -> None:
    template = replace(TEMPLATE, due_version=due)
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    made = summarize(problems, [ended(versions=spans), ended(versions=spans)], template)
    final = as_final(made, 6)
    assert bool(final) is is_final
    assert all(result.is_final and result.success_rate == 1.0 for result in final)
    assert as_final([], 6) == []


def test_several_data_sets_come_after_the_result_for_all() -> None:
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    results = summarize(problems, [ended(versions=None), ended(reward=0.0, versions=None)], TEMPLATE)
    assert [(r.dataset_name, r.success_rate) for r in results] == [("all", 0.5), ("b", 0.0), ("train", 1.0)]
    assert (results[0].min_version, results[0].max_version) == (4, 6)


def test_an_evaluation_in_which_everything_failed_is_over_and_has_no_averages() -> None:
    failed = RolloutFailed(0, "x", "")
    (result,) = summarize([PROBLEM], [failed], TEMPLATE)
    assert (result.due_version, result.num_rollouts, result.num_failed, result.dataset_name) == (4, 1, 1, "train")
    assert result.success_rate is None and result.mean_reward is None and result.metrics == {}
    assert msgspec.json.decode(msgspec.json.encode(result), type=EvaluationResult) == result
    problems = [PROBLEM, Problem(id="q", dataset_name="b", data={})]
    (of_two,) = summarize(problems, [failed, failed], TEMPLATE)
    assert (of_two.dataset_name, of_two.num_failed, of_two.success_rate) == ("all", 2, None)
    assert as_final(summarize([PROBLEM], [failed], replace(TEMPLATE, max_version=4)), 4) == []
