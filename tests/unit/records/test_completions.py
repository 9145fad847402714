"""T2, D9: a server's completion, packed or JSON, is checked by one set of rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from fakes.completions import LOGPROBS, as_json, packed

from pipelinerl.errors import RetryableRolloutError, RolloutError
from pipelinerl.records import VersionSpan
from pipelinerl.records.completion import Completion, is_finished, read_completion

both = pytest.mark.parametrize("encode", [packed, as_json])
Encode = Callable[..., bytes]


@both
def test_a_proper_answer(encode: Encode) -> None:
    spans = [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]
    assert read_completion(encode()) == Completion([5, 6, 7], LOGPROBS, "stop", None, spans)
    with_stop = read_completion(encode(stop_reason="END"))
    assert isinstance(with_stop, Completion) and with_stop.stop_string == "END"
    without = read_completion(encode(logprobs=None), collect_logprobs=False)
    assert isinstance(without, Completion) and without.logprobs == []
    unlabelled = read_completion(encode(spans=[("default", 0, 3)]), unlabelled_version=0)
    assert isinstance(unlabelled, Completion) and unlabelled.version_spans == [VersionSpan(0, 0, 3)]


@both
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "missing_logprobs"),
        ({"logprobs": [-0.5, -0.5]}, "length_mismatch"),
        ({"logprobs": [-0.5, -9999.0, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, -9998.0, -0.5]}, "bad_logprob"),
        ({"logprobs": [-0.5, 0.5, -0.5]}, "bad_logprob"),
        ({"spans": None}, "unversioned"),
        ({"spans": [("default", 0, 3)]}, "unversioned"),
        ({"spans": [("3", 0, 2)]}, "bad_version_spans"),
        ({"spans": [("3", 1, 3)]}, "bad_version_spans"),
        ({"spans": [("3", 0, 2), ("4", 1, 3)]}, "bad_version_spans"),
        ({"finish_reason": "mystery"}, "bad_finish_reason"),
    ],
)
def test_t2_answers_that_cannot_be_trained_on_are_rejected_with_a_reason(
    encode: Encode, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RolloutError) as rejected:
        read_completion(encode(**changes))
    assert rejected.value.reason == reason
    assert not isinstance(rejected.value, RetryableRolloutError)


@pytest.mark.parametrize("values", [[-0.5, math.nan, -0.5], [-0.5, -math.inf, -0.5], [-math.inf, math.inf, -0.5]])
def test_t2_packed_log_probs_that_are_not_finite(values: list[float]) -> None:
    with pytest.raises(RolloutError) as rejected:
        read_completion(packed(logprobs=values))
    assert rejected.value.reason == "bad_logprob"


def test_t2_json_log_probs_of_other_tokens_and_null() -> None:
    cases: Any = (({"logprob_ids": [5, 6, 8]}, "length_mismatch"), ({"logprobs": [-0.5, None, 0]}, "bad_logprob"))
    for changes, reason in cases:
        with pytest.raises(RolloutError) as rejected:
            read_completion(as_json(**changes))
        assert rejected.value.reason == reason


def test_t2_garbage_and_cut_off_answers() -> None:
    whole = packed()
    contents = [whole[:end] for end in range(1, len(whole))]
    for content in (*contents, b"{", b"\xff", b'{"choices": []}', as_json(logprobs=[math.nan] * 3)):
        with pytest.raises(RolloutError) as rejected:
            read_completion(content)
        assert rejected.value.reason == "bad_response"


@both
@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"finish_reason": "abort"}, "aborted"),
        ({"finish_reason": None}, "aborted"),
        ({"token_ids": [], "logprobs": []}, "empty"),
    ],
)
def test_d9_aborted_and_empty_answers_are_faults(encode: Encode, changes: dict[str, Any], fault: str) -> None:
    assert read_completion(encode(**changes)) == fault


@pytest.mark.parametrize(
    ("reason", "finished"), [("stop", True), ("length", False), ("repetition", False), ("abort", False)]
)
def test_t5_finish_flags(reason: str, finished: bool) -> None:
    assert is_finished(reason) is finished
