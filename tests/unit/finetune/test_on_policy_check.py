"""A server that samples from another distribution than it is believed to ends the run at the first step."""

from __future__ import annotations

import math

import pytest

from pipelinerl.config.sections import LLMParameters
from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.on_policy_check import check_on_policy, samples_everything


def test_ends_that_are_kept_out_are_no_fault_of_a_server() -> None:
    assert samples_everything(LLMParameters(temperature=0.6, stop=["x"], ignore_eos=True))
    assert not samples_everything(LLMParameters(min_tokens=2))


def metrics(tokens: float, difference: float) -> dict[str, float]:
    return {"rl/on_policy_tokens": tokens, "rl/logprob_abs_diff_on_policy": difference}


@pytest.mark.parametrize(("tokens", "difference"), [(10_000, 0.03), (10_000, 0.5), (255, 9.0), (0, math.nan)])
def test_rounding_and_few_tokens_pass(tokens: float, difference: float) -> None:
    check_on_policy(metrics(tokens, difference), 1)
    check_on_policy({}, 1)


@pytest.mark.parametrize("difference", [0.51, 1.54, math.nan, math.inf])
def test_another_distribution_is_refused(difference: float) -> None:
    with pytest.raises(WeightSyncError, match=r"at step 7, 8340 tokens .* expected at most 0.5"):
        check_on_policy(metrics(8340, difference), 7)
