"""Log-probs as arrays, inside vLLM's own output processor: the same numbers as in its objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from pipelinerl.inference.fast_output import keep_arrays, sampled_logprobs

TOKENS = [4, 9, 4, 300]
VALUES = np.array([-0.25, -1e-7, -17.3333, -2.0], np.float32)


def lists(first: int, last: int) -> LogprobsLists:
    ids = np.array(TOKENS[first:last], np.int32)[:, None]
    return LogprobsLists(ids, VALUES[first:last, None], np.ones(last - first, np.int64), None)


class Engine:
    """The part of vLLM's engine client that is looked at, with its real output processor."""

    def __init__(self) -> None:
        self.output_processor = OutputProcessor(None, log_stats=False)

    def add(self, request_id: str, flat: bool) -> RequestOutputCollector:
        params = SamplingParams(
            max_tokens=8, logprobs=0, flat_logprobs=flat, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=request_id,
        )
        queue = RequestOutputCollector(params.output_kind, request_id)
        self.output_processor.add_request(request, None, queue=queue)
        return queue

    def process(self, request_id: str, first: int, last: int, version: str) -> None:
        ends = FinishReason.LENGTH if last == len(TOKENS) else None
        output = EngineCoreOutput(request_id, TOKENS[first:last], new_logprobs=lists(first, last), finish_reason=ends)
        self.output_processor.process_outputs([output], weight_version=version)


def run(flat: bool, swap_after: int | None) -> Any:
    """The finished choice of a request whose tokens come as 1, 2, 1; arrays are asked for after so many of those."""
    engine = Engine()
    queue = engine.add("a", flat)
    for step, (first, last, version) in enumerate(((0, 1, "1"), (1, 3, "1"), (3, 4, "2"))):
        if swap_after == step:
            assert keep_arrays(engine, "a")
        engine.process("a", first, last, version)
    output = queue.get_nowait()
    assert output is not None and output.finished
    return output.outputs[0]


@pytest.mark.parametrize("swap_after", [0, 1, 2])
def test_arrays_say_what_vllms_objects_say(swap_after: int) -> None:
    plain, arrays = run(flat=False, swap_after=None), run(flat=True, swap_after=swap_after)
    expected = [entry[token].logprob for entry, token in zip(plain.logprobs, plain.token_ids, strict=True)]
    assert sampled_logprobs(arrays.logprobs, arrays.token_ids).tolist() == expected
    assert arrays.token_ids == plain.token_ids == TOKENS
    assert arrays.weight_versions == plain.weight_versions
    assert (arrays.finish_reason, arrays.stop_reason) == (plain.finish_reason, plain.stop_reason)


def test_a_vllm_that_is_built_otherwise_is_left_alone() -> None:
    engine = Engine()
    engine.add("plain", flat=False)
    assert not keep_arrays(engine, "plain")
    assert not keep_arrays(engine, "unknown")
    assert not keep_arrays(SimpleNamespace(), "a")
    engine.add("other", flat=True)
    engine.output_processor.request_states["other"].logprobs_processor = object()  # type: ignore[assignment]
    assert not keep_arrays(engine, "other")


def test_a_logprob_of_another_token_is_no_number() -> None:
    values = sampled_logprobs([lists(0, 4)], [4, 9, 5, 300])
    assert values[[0, 1, 3]].tolist() == VALUES[[0, 1, 3]].tolist()
    assert np.isnan(values[2])


def test_only_the_first_column_is_the_sampled_token() -> None:
    part = LogprobsLists(np.array([[4, 1, 2]]), np.array([[-3.0, -0.1, -0.2]], np.float32), np.array([9]), None)
    assert sampled_logprobs([part], [4]).tolist() == [-3.0]
    assert sampled_logprobs([part], [4, 9]).tolist() == [-3.0]  # the caller sees that one is missing
    assert sampled_logprobs([], [4]).tolist() == []
