"""Reads a server's answer, in bytes or JSON, and checks it: what comes out can be trained on. Pure; waits for nothing.

Called by `llm.client`. One set of checks for both forms.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeGuard, cast

import msgspec

from pipelinerl.errors import RolloutError
from pipelinerl.llm.retry import Fault
from pipelinerl.records import VersionSpan
from pipelinerl.records.completion import (
    PackedSpan,
    decode_completion,
    is_packed,
    unpack_ids,
    unpack_logprobs,
)

# In JSON the server writes NaN and -inf as -9999.0.
LOWEST_LOGPROB = -9998.0
_FINISHED = {"stop": True, "length": False, "repetition": False}
# What vLLM calls its weights before the first update.
_UNLABELLED = "default"


# One for every token: not tracked by the garbage collector, which they would keep busy.
class WireLogprob(msgspec.Struct, gc=False):
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
    """One checked completion: ids, log-probs and spans agree in length."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_string: str | None
    version_spans: list[VersionSpan]


class _Answer(NamedTuple):
    """One choice, whatever its form was; unchecked. `logprob_ids`: the tokens that the log-probs are said to be of."""

    token_ids: list[int]
    logprobs: list[float | None] | None
    logprob_ids: list[int] | None
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
    """Check a server's answer and return it, or the fault (aborted, empty) for which the request is tried again.

    Args:
        content: of the answer.
        collect_logprobs: whether log-probs were asked for.
        unlabelled_version: of a server that was never given a version; None refuses its tokens.

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
    return Completion(
        token_ids=answer.token_ids,
        logprobs=_checked_logprobs(answer) if collect_logprobs else [],
        finish_reason=answer.finish_reason,
        stop_string=answer.stop_reason if isinstance(answer.stop_reason, str) else None,
        version_spans=_checked_spans(answer, unlabelled_version),
    )


def _read_packed(content: bytes) -> _Answer:
    packed = decode_completion(content)
    logprobs = None if packed.logprobs is None else unpack_logprobs(packed.logprobs)
    return _Answer(
        unpack_ids(packed.token_ids),
        cast("list[float | None] | None", logprobs),
        None,  # the server has compared them
        packed.finish_reason,
        packed.stop_reason,
        packed.weight_versions,
    )


def _read_json(content: bytes) -> _Answer:
    choices = _decode_json(content).choices  # its errors are ValueErrors, those of broken UTF-8 as well
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices, expected 1")
    choice = choices[0]
    entries = choice.logprobs.content if choice.logprobs is not None else None
    return _Answer(
        choice.token_ids or [],
        None if entries is None else [entry.logprob for entry in entries],
        None if entries is None else [entry.token_id for entry in entries],
        choice.finish_reason,
        choice.stop_reason,
        choice.weight_versions,
    )


def _checked_logprobs(answer: _Answer) -> list[float]:
    ids, logprobs = answer.token_ids, answer.logprobs
    if logprobs is None:
        raise RolloutError("missing_logprobs", f"no log-probs for {len(ids)} tokens")
    if len(logprobs) != len(ids):
        raise RolloutError("length_mismatch", f"{len(logprobs)} log-probs for {len(ids)} tokens")
    named = ids if answer.logprob_ids is None else answer.logprob_ids
    if named == ids and _all_usable(logprobs):
        return logprobs
    for token_id, named_id, value in zip(ids, named, logprobs, strict=True):  # find the one that is to blame
        if named_id != token_id:
            raise RolloutError("length_mismatch", f"log-prob of token {named_id} where {token_id} was sampled")
        # The comparisons are false for NaN.
        if value is None or not LOWEST_LOGPROB < value <= 1e-3:
            raise RolloutError("bad_logprob", f"log-prob {value} of token {token_id}")
    raise RolloutError("bad_logprob", "a log-prob is not a number")


def _all_usable(logprobs: list[float | None]) -> TypeGuard[list[float]]:
    """Return whether all are finite log-probs, in a few passes of C code rather than one of Python."""
    if None in logprobs:
        return False
    values = cast(list[float], logprobs)
    # A sum with NaN or an infinity in it is not finite either.
    return math.isfinite(sum(values)) and min(values) > LOWEST_LOGPROB and max(values) <= 1e-3


def _checked_spans(answer: _Answer, unlabelled_version: int | None) -> list[VersionSpan]:
    length = len(answer.token_ids)
    if not answer.weight_versions:
        raise RolloutError("unversioned", "the server named no weight version")
    spans = []
    expected_start = 0
    for span in answer.weight_versions:
        label = span.version
        if label == _UNLABELLED and unlabelled_version is not None:
            label = str(unlabelled_version)
        if not (label.isascii() and label.isdecimal()):
            raise RolloutError("unversioned", f"weight version {span.version!r} is not a policy version")
        if span.start != expected_start or span.end <= span.start:
            raise RolloutError("bad_version_spans", f"span [{span.start}, {span.end}) after {expected_start}")
        expected_start = span.end
        spans.append(VersionSpan(int(label), span.start, span.end))
    if expected_start != length:
        raise RolloutError("bad_version_spans", f"spans cover {expected_start} of {length} tokens")
    return spans
