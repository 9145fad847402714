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

from pipelinerl.inference.fast_output import OutputHold, StepLogprobs, as_lists, cheap_to_cut, may_wait


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


def test_release_ships_what_is_held_and_holding_continues() -> None:
    hold, requests = OutputHold(max_tokens=10), {"a": request()}
    for token in range(3):
        hold.pass_on([output(token)], requests)
    assert tokens_of(hold.release()) == [[1, 2]]
    assert hold.pass_on([output(3)], requests) == []
    assert tokens_of(hold.release()) == [[3]]


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


def step(*rows: tuple[int, float, int]) -> LogprobsLists:
    ids, values, ranks = zip(*rows, strict=True)
    return LogprobsLists(np.array(ids)[:, None], np.array(values, np.float32)[:, None], np.array(ranks), None)


def test_log_probs_that_are_cut_cheaply_are_the_same_afterwards() -> None:
    first, second = step((5, -0.1, 1), (6, -0.2, 2)), step((7, -1 / 3, 9), (8, -0.4, 3))
    cheap = [cheap_to_cut(whole) for whole in (first, second)]
    assert cheap[0].slice_request(1, 1) == (6, np.float32(-0.2).item(), 2)
    for parts in (
        [each.slice_request(1, 1) for each in cheap],
        [cheap[0].slice_request(1, 1), second.slice_request(1, 1)],
        [first.slice_request(1, 1), cheap[1].slice_request(1, 1)],
    ):
        joined = as_lists(parts)
        assert joined.logprob_token_ids.tolist() == [[6], [8]]
        assert joined.logprobs.tolist() == [[np.float32(-0.2).item()], [np.float32(-0.4).item()]]
        assert joined.logprobs.dtype == np.float32
        assert joined.sampled_token_ranks.tolist() == [2, 3]
    assert as_lists([cheap[1].slice_request(0, 1)]).logprobs.tolist() == [[np.float32(-1 / 3).item()]]
    assert cheap[0].slice_request(0, 2).logprob_token_ids.tolist() == [[5], [6]]
    assert len(cheap[0].slice_request(0, 0).logprobs) == 0


def test_log_probs_of_more_tokens_are_cut_as_ever() -> None:
    two_columns = LogprobsLists(np.zeros((3, 2)), np.zeros((3, 2)), np.zeros(3), None)
    several_a_request = step((5, -0.1, 1))._replace(cu_num_generated_tokens=[0, 1])
    for whole in (two_columns, several_a_request, None):
        assert cheap_to_cut(whole) is whole
    assert isinstance(cheap_to_cut(step((5, -0.1, 1))), StepLogprobs)


def test_nothing_leaves_as_plain_numbers() -> None:
    """Also what is not held back, or is the first token: the API process reads arrays only."""
    cheap = cheap_to_cut(step((5, -0.1, 1)))
    hold, requests = (
        OutputHold(max_tokens=3),
        {"a": request(), "streamed": request(output_kind=RequestOutputKind.DELTA)},
    )
    for name in ("a", "streamed"):
        (sent,) = hold.pass_on([EngineCoreOutput(name, [5], new_logprobs=cheap.slice_request(0, 1))], requests)
        assert isinstance(sent.new_logprobs, LogprobsLists)
    assert hold.pass_on([EngineCoreOutput("a", [5], new_logprobs=cheap.slice_request(0, 1))], requests) == []
    (released,) = hold.release()
    assert isinstance(released.new_logprobs, LogprobsLists)


def wide(token: int, columns: int) -> LogprobsLists:
    """A step in which another request wanted the best `columns - 1` tokens as well."""
    ids = np.array([[token, *range(100, 99 + columns)]])
    return LogprobsLists(ids, -ids.astype(np.float32) / 10, np.array([1]), None)


def test_steps_in_which_another_request_wanted_more_are_joined_with_others() -> None:
    """The sampler gives every request of a step the columns of the greediest one."""
    hold, requests = OutputHold(max_tokens=10), {"a": request(logprobs=0)}
    narrow = cheap_to_cut(step((4, -0.4, 1))).slice_request(0, 1)
    sent = []
    for token, logprobs in ((2, wide(2, 6)), (3, wide(3, 6)), (4, narrow), (5, wide(5, 3))):
        sent += hold.pass_on([EngineCoreOutput("a", [token], new_logprobs=logprobs)], requests)
    sent += hold.release()
    assert tokens_of(sent) == [[2], [3, 4, 5]]
    joined = sent[1].new_logprobs
    assert joined is not None
    assert joined.logprob_token_ids.tolist() == [[3], [4], [5]]
    assert joined.logprobs.tolist() == [[np.float32(value).item()] for value in (-0.3, -0.4, -0.5)]


def test_void_logprobs_leaves_tokens_without_them() -> None:
    hold, requests = OutputHold(max_tokens=10), {"a": request()}
    for token in range(2):
        hold.pass_on([output(token)], requests)
    assert hold.void_logprobs() == 1
    (end,) = hold.pass_on([output(2, FinishReason.LENGTH)], requests)
    assert end.new_token_ids == [1, 2]
    assert end.new_logprobs is not None
    assert len(end.new_logprobs.logprobs) == 1
