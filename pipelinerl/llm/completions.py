"""Reads and checks a server's completion, packed or JSON: what passes can be trained on, the rest has a reason."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import msgspec

from pipelinerl.errors import RolloutError
from pipelinerl.llm.client import Fault
from pipelinerl.records import VersionSpan
from pipelinerl.records.completion import (
    PackedSpan,
    decode_completion,
    is_packed,
    parse_weight_label,
    unpack_ids,
    unpack_logprobs,
)

# In JSON the server writes NaN and -inf as -9999.0.
LOWEST_LOGPROB = -9998.0
# Rounding can push the log-prob of a certain token slightly above 0.
_HIGHEST_LOGPROB = 1e-3
_FINISHED = {"stop": True, "length": False, "repetition": False}
# vLLM's label for weights that were never updated.
_UNLABELLED = "default"


class WireLogprob(msgspec.Struct, gc=False):  # one per token: keep them off the garbage collector
    token_id: int
    logprob: float | None = None


class WireLogprobs(msgspec.Struct):
    content: list[WireLogprob] | None = None


class WireChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[PackedSpan] | None = None


class WireResponse(msgspec.Struct):
    choices: list[WireChoice]


class Completion(msgspec.Struct, frozen=True):
    """One checked completion. `logprobs` (if collected) and `version_spans` cover `token_ids` exactly."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_string: str | None
    version_spans: list[VersionSpan]


class _Answer(NamedTuple):
    """An unchecked choice in either form. `logprob_ids` are the tokens that the log-probs claim to belong to."""

    token_ids: list[int]
    logprobs: list[float] | list[float | None] | None
    logprob_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[PackedSpan] | None


_decode_json = msgspec.json.Decoder(WireResponse).decode


def is_finished(finish_reason: str) -> bool:
    """Return whether the model ended the sequence itself (end token or stop string) rather than running out of room."""
    return _FINISHED.get(finish_reason, False)


def read_completion(
    content: bytes, collect_logprobs: bool = True, unlabelled_version: int | None = None
) -> Completion | Fault:
    """Return the completion in `content`, or the fault (aborted, empty) for which the request is retried.

    Args:
        content: body of the answer.
        collect_logprobs: whether log-probs were requested.
        unlabelled_version: version of tokens from a server that was never given one; None rejects them.

    Raises:
        RolloutError: `bad_response`, `bad_finish_reason`, `length_mismatch`, `missing_logprobs`, `bad_logprob`,
            `unversioned` or `bad_version_spans`. Nothing is shortened or filled in.
    """
    try:
        answer = _read_packed(content) if is_packed(content) else _read_json(content)
    except ValueError as error:
        raise RolloutError("bad_response", str(error)) from error
    if answer.finish_reason in (None, "abort", "error"):
        return Fault.ABORTED
    if answer.finish_reason not in _FINISHED:
        raise RolloutError("bad_finish_reason", str(answer.finish_reason))
    if not answer.token_ids:
        return Fault.EMPTY
    logprobs = _checked_logprobs(answer) if collect_logprobs else []
    spans = _labelled_spans(answer.weight_versions or [], unlabelled_version)
    check_spans(spans, len(answer.token_ids))
    stop_string = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    return Completion(answer.token_ids, logprobs, answer.finish_reason, stop_string, spans)


def check_spans(spans: list[VersionSpan], length: int) -> None:
    """Check that `spans` cover `length` tokens without gaps.

    Raises:
        RolloutError: `unversioned` without any span, else `bad_version_spans`.
    """
    if not spans:
        raise RolloutError("unversioned", f"no version spans for {length} tokens")
    expected_start = 0
    for span in spans:
        if span.start != expected_start or span.end <= span.start:
            raise RolloutError("bad_version_spans", f"span [{span.start}, {span.end}) after {expected_start} tokens")
        expected_start = span.end
    if expected_start != length:
        raise RolloutError("bad_version_spans", f"spans cover {expected_start} of {length} tokens")


def _read_packed(content: bytes) -> _Answer:
    packed = decode_completion(content)
    ids = unpack_ids(packed.token_ids)
    logprobs = None if packed.logprobs is None else unpack_logprobs(packed.logprobs)
    # The server packs the log-probs of exactly these ids.
    return _Answer(ids, logprobs, ids, packed.finish_reason, packed.stop_reason, packed.weight_versions)


def _read_json(content: bytes) -> _Answer:
    choices = _decode_json(content).choices  # its errors are ValueErrors, also for invalid UTF-8
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices, expected 1")
    choice = choices[0]
    entries = choice.logprobs.content if choice.logprobs is not None else None
    return _Answer(
        choice.token_ids or [],
        None if entries is None else [entry.logprob for entry in entries],
        [entry.token_id for entry in entries or []],
        choice.finish_reason,
        choice.stop_reason,
        choice.weight_versions,
    )


def are_logprobs(values: Sequence[float]) -> bool:
    """False if a value is not finite, positive beyond rounding, or the server's stand-in for NaN."""
    # Passes in C: a NaN or an infinity makes the sum one too.
    if not len(values):
        return True
    return isfinite(sum(values)) and min(values) > LOWEST_LOGPROB and max(values) <= _HIGHEST_LOGPROB


def _checked_logprobs(answer: _Answer) -> list[float]:
    ids = answer.token_ids
    if answer.logprobs is None:
        raise RolloutError("missing_logprobs", f"no log-probs for {len(ids)} tokens")
    if len(answer.logprobs) != len(ids):
        raise RolloutError("length_mismatch", f"{len(answer.logprobs)} log-probs for {len(ids)} tokens")
    checked = []
    for token_id, logprob_id, value in zip(ids, answer.logprob_ids, answer.logprobs, strict=True):
        if logprob_id != token_id:
            raise RolloutError("length_mismatch", f"log-prob of token {logprob_id}, but token {token_id} was sampled")
        # The comparisons are false for NaN.
        if value is None or not LOWEST_LOGPROB < value <= _HIGHEST_LOGPROB:
            raise RolloutError("bad_logprob", f"log-prob {value} of token {token_id}")
        checked.append(value)
    return checked


def _labelled_spans(spans: list[PackedSpan], unlabelled_version: int | None) -> list[VersionSpan]:
    labelled = []
    for span in spans:
        label = span.version
        if label == _UNLABELLED and unlabelled_version is not None:
            label = str(unlabelled_version)
        try:
            policy, version = parse_weight_label(label)
        except ValueError as error:
            raise RolloutError("unversioned", str(error)) from error
        if policy:
            raise RolloutError("unversioned", f"tokens of policy {policy!r}, expected the run's only policy")
        labelled.append(VersionSpan(version, span.start, span.end))
    return labelled
