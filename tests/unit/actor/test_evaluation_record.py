"""What is recorded of evaluations: which rollouts, what of them, and that nothing about it can end a run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pipelinerl.actor.evaluation import Evaluator
from pipelinerl.actor.evaluation_record import EvaluationRecorder, rollout_record
from pipelinerl.actor.frames import RolloutEnded, RolloutFailed, StartRollout, sendable
from pipelinerl.actor.scheduler import Attempt, Scheduler
from pipelinerl.actor.slots import ServerSlots
from pipelinerl.actor.worker import RolloutWorker
from pipelinerl.config.resources import FileStreams
from pipelinerl.domains.problem_sets import Problem
from pipelinerl.errors import RolloutError, StreamError
from pipelinerl.llm.sample_builder import recorded_samples
from pipelinerl.records import EvaluationRollout, RolloutSummary, VersionSpan
from pipelinerl.records.codec import RecordCodec
from pipelinerl.rollouts import TrainingText
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


@pytest.mark.parametrize("packed", [False, True])
def test_whatever_metadata_holds_can_be_written(packed: bool) -> None:
    odd = {"score": math.nan, "where": Path("/x"), 3: "\ud800", "deep": {"inf": [math.inf]}}
    (sample,) = recorded(text(metadata=odd, reward=math.inf, input_ids=[], text="half \ud800"), reward=math.nan)
    record = EvaluationRollout(
        id="e/r0",
        group_id="e",
        problem_id="p",
        dataset_name="d",
        problem="{}",
        due_version=5,
        is_final=False,
        samples=[sample],
    )
    codec = RecordCodec[EvaluationRollout](EvaluationRollout, packed=packed)
    assert codec.decode(codec.encode(record)) == record
    assert sample.metadata == {"score": "NaN", "where": "/x", "3": "?", "deep": {"inf": ["Infinity"]}}
    assert sample.reward == 0.0 and sample.prompt_text + sample.output_text == "half ?"


def recorder_of(limit: int | None, open_writer: Any = None) -> EvaluationRecorder:
    return EvaluationRecorder(open_writer or (lambda: pytest.fail("nothing is to be written")), limit, incarnation=1)


@pytest.mark.parametrize(
    ("limit", "count", "places"),
    [(None, 3, {0, 1, 2}), (5, 3, {0, 1, 2}), (0, 3, set()), (3, 10, {0, 3, 6}), (2, 4, {0, 2}), (4, 0, set())],
)
def test_the_recorded_ones_are_spread_over_all(limit: int | None, count: int, places: set[int]) -> None:
    assert recorder_of(limit).places(count) == places


def ended(start: StartRollout) -> RolloutEnded | RolloutFailed:
    if start.problem["n"] == 0:
        return RolloutFailed(0, "exception_ValueError", "x" * 9000 + "the end")
    summary = RolloutSummary(
        rollout_id=start.rollout_id, reward=1.0, success=True, num_samples=1, output_tokens=1, latency_s=0.1
    )
    samples = recorded_samples(
        [text()], group_id=start.group_id, rollout_id=start.rollout_id, incarnation=1, reward=1.0
    )
    return RolloutEnded(0, [], summary, None, 4, 5, 1, 0, recorded=samples if start.record else [])


def test_what_cannot_be_recorded_never_costs_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    start = StartRollout(
        ticket=1, rollout_id="e/r1", group_id="e", problem={"n": 1}, server=0, seed=0, evaluation=True, record=True
    )
    answer = ended(start)
    assert isinstance(answer, RolloutEnded) and sendable(answer) is answer
    odd = recorded(text(version_spans=[("v3", 0, 1)]))
    bare = sendable(replace(answer, recorded=odd))
    assert bare == replace(answer, recorded=[]) and "e/r1 said is not recorded" in caplog.text
    with pytest.raises(RolloutError, match="cannot be recorded"):
        sendable(replace(answer, recorded=odd, dataset_name="\ud800"))


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
    assert worker._failed(start, llm, error) == RolloutFailed(4, reason, message, requests=2, retries=1)


class Runner:
    def __init__(self) -> None:
        self.starts: list[StartRollout] = []

    async def run(self, start: StartRollout, timeout_s: float) -> RolloutEnded | RolloutFailed:
        self.starts.append(start)
        return ended(start)


async def evaluate(recorder: EvaluationRecorder, is_final: bool = False) -> tuple[Runner, list[Any]]:
    runner = Runner()
    scheduler = Scheduler(ServerSlots(1, 4, lambda: None), runner, timeout_s=10, max_retries=0)
    problems = [Problem(id=f"p{n}", dataset_name="test", data={"n": n}) for n in range(4)]
    evaluator = Evaluator(scheduler, problems, 3, 1, on_answer=lambda answer: None, recorder=recorder)
    return runner, await evaluator.run(4, lambda: 4, is_final, concurrency=2)


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


async def test_none_are_recorded_with_0(tmp_path: Path) -> None:
    recorder = recorder_of(0)
    runner, results = await evaluate(recorder)
    await recorder.close()
    assert not any(start.record for start in runner.starts) and results[0].num_rollouts == 4


async def test_o2_a_stream_that_cannot_be_written_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def write(self, record: Any) -> int:
            raise StreamError("stream x: No space left on device")

        flush = end_waits = close = lambda self: None

    recorder = recorder_of(None, lambda: LoopWriter(Broken(), may_wait=False))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        _, results = await evaluate(recorder)
        await recorder.close()
    assert results[0].num_rollouts == 4 and recorder.unrecorded == 4
    warning, total = caplog.messages
    assert "actor.recorded_test_samples=0" in warning and "No space left" in warning
    assert total == "4 rollouts of evaluations were not recorded in this start of the run"


@pytest.mark.parametrize("fails_at", ["open", "write", "flush"])
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
            once("flush")
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
    lost = 0 if fails_at == "flush" else 1
    assert len(reader.read(timeout_s=0)) == 8 - lost and recorder.unrecorded == lost
    (warning,) = caplog.messages
    assert "No space left" in warning and "actor/unrecorded_test_samples" in warning
    assert ("it counts in their averages" in warning) == (fails_at != "flush")


def test_a_problem_of_any_size_and_kind_is_recorded() -> None:
    def problem_of(data: dict[Any, Any]) -> str:
        attempt = Attempt("e/r0", "e", Problem(id="p", dataset_name="d", data=data), seed=1, evaluation=True)
        return rollout_record(attempt, RolloutFailed(0, "x", ""), 1, False, 0).problem

    long = problem_of({"tests": "y" * 10_000})
    assert long.startswith('{"tests": "yyy') and long.endswith("(6013 characters cut)") and len(long) < 4100
    assert problem_of({("a", 1): 2}) == "{('a', 1): 2}"
