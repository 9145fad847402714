"""From calls to samples: masks, flags, checks (T2, T5), and results of user code (R1)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.llm import LLMCall, LLMOutput, Prompt, TrainableLLM
from pipelinerl.llm.client import make_training_text
from pipelinerl.llm.sample_builder import (
    build_samples,
    check_result,
    checked_reward,
    complete_texts,
    summarize,
    version_range,
)
from pipelinerl.records import Sample, VersionSpan
from pipelinerl.records.codec import RecordCodec
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

LLM = TrainableLLM("http://unused", "actor", parameters={"temperature": 0.6})


def make_call(**changes: Any) -> LLMCall:
    call = LLMCall(
        prompt=Prompt(messages=[{"role": "user", "content": "hi"}]),
        output=LLMOutput(content="yes"),
        prompt_token_ids=[4, 5],
        output_token_ids=[6, 7, 0],
        logprobs=[-0.1, -0.2, -0.3],
        finish_reason="stop",
        version_spans=[VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)],
        prompt_text="<user>hi",
        output_text="yes",
    )
    return replace(call, **changes)


def make_text(**changes: Any) -> TrainingText:
    return replace(make_training_text(LLM, make_call()), **{"reward": 1.0, **changes})


def test_prompt_is_masked_and_output_trained() -> None:
    text = make_text()
    assert text.input_ids == [4, 5, 6, 7, 0]
    # The end token (here 0, which is also the padding token) is trained: masks go by place, not by id.
    assert text.labels == [-100, -100, 6, 7, 0]
    assert (text.prompt_text, text.output_text, text.n_predicted) == ("<user>hi", "yes", 3)
    assert (text.prompt_tokens, text.output_tokens, text.finished, text.temperature) == (2, 3, True, 0.6)


def test_samples_carry_ids_spans_and_reward() -> None:
    samples = build_samples([make_text(reward=0.0), make_text(reward=1)], group_id="0-7", rollout_id="0-7/r1")
    assert [sample.id for sample in samples] == ["0-7/r1/s0", "0-7/r1/s1"]
    assert [sample.reward for sample in samples] == [0.0, 1.0]
    assert samples[0].version_spans == [VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)]
    assert (samples[0].group_id, samples[0].rollout_id, samples[0].finish_reason) == ("0-7", "0-7/r1", "stop")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": [-100, -100, 6, 7]}, "length_mismatch"),
        ({"logprobs": [-0.1, -0.2]}, "length_mismatch"),
        ({"logprobs": [-0.1, -0.2, float("nan")]}, "bad_logprob"),
        ({"logprobs": [-0.1, -0.2, -9999.0]}, "bad_logprob"),
        ({"logprobs": [-0.1, -0.2, 0.5]}, "bad_logprob"),
        ({"ref_logprobs": [-0.1, -0.2, -math.inf]}, "bad_logprob"),
        ({"labels": [-100] * 5, "logprobs": []}, "no_trained_token"),
        ({"labels": [-100, -100, 6, 8, 0]}, "bad_labels"),
        ({"labels": [4, -100, 6, 7, -100]}, "bad_labels"),
        ({"ref_logprobs": [-0.1]}, "length_mismatch"),
        ({"ref_logprobs": [-0.1, -0.2, math.inf]}, "bad_logprob"),
        ({"version_spans": []}, "unversioned"),
        ({"version_spans": [VersionSpan(2, 0, 2)]}, "bad_version_spans"),
        ({"reward": None}, "bad_reward"),
        ({"reward": float("nan")}, "bad_reward"),
        ({"reward": 1e308}, "bad_reward"),
        ({"reward": "1.0"}, "bad_reward"),
    ],
)
def test_t2_texts_that_do_not_fit_together_fail_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RolloutError) as refused:
        build_samples([make_text(), make_text(**changes)], group_id="g", rollout_id="r")
    assert refused.value.reason == reason


def test_rewards_of_other_number_types() -> None:
    assert checked_reward(0.0) == 0.0
    assert checked_reward(True) == 1.0
    assert checked_reward(np.float32(0.5)) == 0.5


def test_whatever_metadata_holds_can_be_written() -> None:
    odd = {
        "nan": math.nan,
        "deep": [{"inf": [-math.inf]}],
        "half \ud800": "\udfff",
        "ids": [2**64, -(2**63), 2**63 - 1, -(2**63) - 1],
        "array": np.arange(2),
        "none": None,
    }
    (sample,) = build_samples([make_text(metadata=odd)], group_id="g", rollout_id="r")
    codec = RecordCodec[Sample](Sample)
    assert codec.decode(codec.encode(sample)) == sample
    assert sample.metadata == {
        "nan": "NaN",
        "deep": [{"inf": ["-Infinity"]}],
        "half ?": "?",
        "ids": ["18446744073709551616", -(2**63), 2**63 - 1, "-9223372036854775809"],
        "array": "[0 1]",
        "none": None,
    }


class MyMetrics(BaseMetrics):
    guesses: int
    note: str = ""
    broken: float = float("inf")
    huge: float = 1e308  # the mean of two would be infinite
    longest: int = 10**400
    largest: float = 3e38


def test_numbers_of_own_metrics_are_kept() -> None:
    result = RolloutResult([make_text()], MyMetrics(reward=2, success=1, no_error=True, no_answer=0, guesses=4))  # type: ignore[arg-type]
    summary = summarize(result, "0-1/r0")
    assert (summary.reward, summary.success, summary.num_samples) == (2.0, True, 1)
    assert summary.metrics == {"no_error": 1.0, "no_answer": 0.0, "guesses": 4.0, "largest": 3e38}
    assert version_range(result.training_texts) == (2, 3)
    assert version_range([]) is None


async def my_rollout() -> None: ...


@pytest.mark.parametrize(
    "result",
    [
        None,
        {"reward": 1},
        RolloutResult([], {"reward": 1}),  # type: ignore[arg-type]
        RolloutResult([{"text": "x"}], BaseMetrics(reward=0, success=False)),  # type: ignore[list-item]
    ],
)
def test_results_of_another_shape_name_the_users_function(result: Any) -> None:
    with pytest.raises(DomainError) as refused:
        check_result(result, my_rollout)
    assert "my_rollout" in str(refused.value) and "test_samples.py" in str(refused.value)


def test_t4_only_samples_of_the_trainers_temperature_are_trained() -> None:
    (sample,) = build_samples([make_text()], group_id="g", rollout_id="r", temperature=0.6)
    assert sample.temperature == 0.6
    for temperature in (0.0, 1.0):
        with pytest.raises(RolloutError) as refused:
            texts = [make_text(), make_text(temperature=temperature)]
            build_samples(texts, group_id="g", rollout_id="r", temperature=0.6)
        assert refused.value.reason == "other_temperature"


def by_hand(seen: set[int], model_version: Any = None) -> tuple[RolloutResult, TrainableLLM]:
    """A result with a text that has the fields which users fill, and the handle that answered."""
    text = TrainingText(
        text="<user>hiyes",
        n_predicted=3,
        reward=1.0,
        logprobs=[-0.1, -0.2, -0.3],
        input_ids=[4, 5, 6, 7, 0],
        labels=[-100, -100, 6, 7, 0],
        finished=True,
        prompt_tokens=2,
        output_tokens=3,
    )
    llm = LLM.for_rollout(seed=1)
    llm.counters.versions.update(seen)
    return RolloutResult([text], BaseMetrics(reward=1.0, success=True), model_version=model_version), llm


@pytest.mark.parametrize(("seen", "stated"), [({7}, None), ({7}, 7), (set(), 7), ({6, 7}, 7)])
def test_a_text_filled_by_hand_gets_the_version_that_is_known(seen: set[int], stated: int | None) -> None:
    result, llm = by_hand(seen, stated)
    complete_texts(result, llm.temperature, llm.counters.versions)
    (sample,) = build_samples(result.training_texts, group_id="g", rollout_id="r")
    assert sample.version_spans == [VersionSpan(7, 0, 3)]
    assert sample.temperature == 0.6  # the handle's: the log-probs are of that distribution


@pytest.mark.parametrize(("seen", "stated"), [({6, 7}, None), (set(), None), ({6}, 7), ({7}, "7"), (set(), -1)])
def test_a_version_is_never_guessed(seen: set[int], stated: Any) -> None:
    result, llm = by_hand(seen, stated)
    with pytest.raises(RolloutError) as refused:
        complete_texts(result, llm.temperature, llm.counters.versions)
        build_samples(result.training_texts, group_id="g", rollout_id="r")
    assert refused.value.reason == "unversioned"


def test_the_versions_of_a_rollout_without_texts_are_those_that_answered() -> None:
    assert version_range([], {5, 3}) == (3, 5)
    assert version_range([make_text()], {5}) == (2, 3)
