"""Completions as servers write them: ids 5, 6, 7 with log-probs and the versions 3, 3, 4."""

from __future__ import annotations

import json
from array import array
from typing import Any

from pipelinerl.records.completion import PackedSpan, encode_completion

SPANS = [("3", 0, 2), ("4", 2, 3)]
LOGPROBS = [-0.5, -0.5, -0.5]


def packed(
    token_ids: Any = (5, 6, 7), logprobs: Any = LOGPROBS, finish_reason: Any = "stop", stop_reason: Any = None,
    spans: Any = SPANS,
) -> bytes:  # fmt: skip
    return encode_completion(
        array("i", token_ids).tobytes(),
        None if logprobs is None else array("f", logprobs).tobytes(),
        finish_reason,
        stop_reason,
        None if spans is None else [PackedSpan(*span) for span in spans],
    )


def as_json(
    token_ids: Any = (5, 6, 7), logprobs: Any = LOGPROBS, finish_reason: Any = "stop", stop_reason: Any = None,
    spans: Any = SPANS, logprob_ids: Any = (5, 6, 7),
) -> bytes:  # fmt: skip
    entries = None if logprobs is None else [
        {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
        for token, value in zip(logprob_ids, logprobs, strict=False)
    ]  # fmt: skip
    choice = {
        "index": 0,
        "token_ids": list(token_ids),
        "logprobs": {"content": entries},
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "weight_versions": None if spans is None else [dict(zip(("version", "start", "end"), s)) for s in spans],  # noqa: B905
    }
    return json.dumps({"request_id": "x", "choices": [choice], "usage": {}}).encode()
