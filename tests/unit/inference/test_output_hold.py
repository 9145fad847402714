"""Tokens that are held back come out complete, in order, and with their log-probs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from pipelinerl.inference.coalesce import OutputHold, may_wait


def request(**settings: Any) -> Any:
    parameters = {"output_kind": RequestOutputKind.FINAL_ONLY, **settings}
    return SimpleNamespace(sampling_params=SamplingParams(**parameters))


def output(token: int, finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 10]]), np.array([1]), None)
    return EngineCoreOutput("a", [token], new_logprobs=logprobs, finish_reason=finish_reason)


def tokens_of(outputs: list[EngineCoreOutput]) -> list[list[int]]:
    return [item.new_token_ids for item in outputs]


def test_first_token_full_batches_and_the_end_go_out() -> None:
    hold, requests = OutputHold(max_tokens=3), {"a": request()}
    sent = [hold.pass_on([output(token)], requests) for token in range(6)]
    assert [tokens_of(step) for step in sent] == [[[0]], [], [], [[1, 2, 3]], [], []]
    (end,) = hold.pass_on([output(6, FinishReason.STOP)], {})
    assert (end.new_token_ids, end.finish_reason) == ([4, 5, 6], FinishReason.STOP)
    assert end.new_logprobs is not None
    assert end.new_logprobs.logprobs[:, 0].tolist() == [-0.4, -0.5, -0.6]
    assert end.new_logprobs.logprob_token_ids[:, 0].tolist() == [4, 5, 6]
    assert hold.release() == []


def test_release_ships_what_is_held_and_goes_on_holding() -> None:
    hold, requests = OutputHold(max_tokens=10), {"a": request()}
    for token in range(3):
        hold.pass_on([output(token)], requests)
    assert tokens_of(hold.release()) == [[1, 2]]
    assert hold.pass_on([output(3)], requests) == []
    assert tokens_of(hold.release()) == [[3]]


def test_void_logprobs_leaves_tokens_without_them() -> None:
    hold, requests = OutputHold(max_tokens=10), {"a": request()}
    for token in range(2):
        hold.pass_on([output(token)], requests)
    assert hold.void_logprobs() == 1
    (end,) = hold.pass_on([output(2, FinishReason.LENGTH)], requests)
    assert end.new_token_ids == [1, 2]
    assert end.new_logprobs is not None
    assert len(end.new_logprobs.logprobs) == 1


def test_aborted_requests_are_forgotten() -> None:
    hold, requests = OutputHold(max_tokens=10), {"a": request()}
    for token in range(2):
        hold.pass_on([output(token)], requests)
    hold.forget(["a", "unknown"])
    assert hold.release() == []


@pytest.mark.parametrize(
    "settings",
    [{"output_kind": RequestOutputKind.DELTA}, {"stop": ["x"]}, {"prompt_logprobs": 0}],
)
def test_streams_stop_strings_and_prompt_logprobs_are_not_held(settings: dict[str, Any]) -> None:
    assert may_wait(request())
    assert not may_wait(request(**settings))
    hold = OutputHold(max_tokens=10)
    assert tokens_of(hold.pass_on([output(0)], {"a": request(**settings)})) == [[0]]
    assert tokens_of(hold.pass_on([output(1)], {"a": request(**settings)})) == [[1]]
