"""Notices that nothing is learned, and how often they come."""

from __future__ import annotations

from pipelinerl.records import FateRecord, MetricRecord
from pipelinerl.tracking.collector import LearningWatch


def record(step: int, fraction: float | None, reward: float = 0.0) -> MetricRecord:
    values = {"finetune/reward_mean": reward}
    if fraction is not None:
        values["finetune/zero_advantage_fraction"] = fraction
    return MetricRecord(source="finetune_0", step=step, time=1.0, values=values)


def filtered(samples: int, reason: str = "zero_advantage") -> FateRecord:
    ids = [str(index) for index in range(samples)]
    return FateRecord(sample_ids=ids, fate="filtered", reason=reason, version=1, group_id="g", source="preprocessor_0")


def said(watch: LearningWatch, first: int, last: int, fraction: float | None) -> dict[int, str]:
    texts = {step: watch.step(record(step, fraction, reward=1.0)) for step in range(first, last + 1)}
    return {step: text for step, text in texts.items() if text is not None}


def test_five_steps_in_a_row_are_said_once_and_then_every_fifty() -> None:
    notices = said(LearningWatch(64, "run/actor_0/stdout.log"), 1, 120, 1.0)
    assert list(notices) == [5, 55, 105]
    assert " 5 steps" in notices[5] and "run/actor_0/stdout.log" in notices[5]


def test_one_step_that_teaches_something_starts_the_count_again() -> None:
    watch = LearningWatch(64, "s")
    assert not said(watch, 1, 4, 1.0)
    assert not said(watch, 5, 5, 0.99)
    assert list(said(watch, 6, 12, 1.0)) == [10]


def test_steps_without_the_number_say_nothing() -> None:
    assert not said(LearningWatch(64, "s"), 1, 200, None)


def test_samples_that_are_all_filtered_are_said_though_no_step_comes() -> None:
    watch = LearningWatch(64, "s")
    texts = [watch.fate(filtered(16)) for _ in range(40)]
    (text,) = [text for text in texts if text]
    assert texts.index(text) == 19, "5 steps of 64 samples are 20 groups of 16"
    assert "320 samples" in text and "5 steps" in text


def test_a_step_in_between_and_other_reasons_do_not_count() -> None:
    watch = LearningWatch(64, "s")
    for step in range(10):
        assert watch.fate(filtered(300)) is None
        assert watch.step(record(step, 0.5)) is None
    assert watch.fate(filtered(10_000, reason="too_long")) is None
