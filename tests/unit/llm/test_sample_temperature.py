"""Samples of another temperature than the trainer's are refused (T4)."""

from __future__ import annotations

import pytest

from pipelinerl.errors import RolloutError
from pipelinerl.llm.sample_builder import build_samples
from pipelinerl.records import VersionSpan
from pipelinerl.rollouts import TrainingText


def text(temperature: float | None) -> TrainingText:
    return TrainingText(
        text="hi yes",
        n_predicted=3,
        reward=1.0,
        input_ids=[4, 5, 6],
        labels=[-100, -100, 6],
        logprobs=[-0.1],
        prompt_tokens=2,
        output_tokens=1,
        version_spans=[VersionSpan(2, 0, 1)],
        temperature=temperature,
    )


@pytest.mark.parametrize("sampled", [0.0, 1.0])
def test_t4_samples_of_another_temperature_are_not_trained(sampled: float) -> None:
    with pytest.raises(RolloutError, match=f"sampled at temperature {sampled:g}, trained at 0.6") as caught:
        build_samples([text(0.6), text(sampled)], group_id="0-7", rollout_id="0-7/r1", temperature=0.6)
    assert caught.value.reason == "other_temperature"


def test_t4_samples_of_the_trainers_temperature_are_taken() -> None:
    (sample,) = build_samples([text(0.6)], group_id="0-7", rollout_id="0-7/r1", temperature=0.6)
    assert sample.temperature == 0.6
