"""Splits a sample into its turns: what the model was given, and what it said. Pure; called by `samples.view`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pipelinerl.records import IGNORED_LABEL, Sample, VersionSpan

Kind = Literal["prompt", "context", "generated"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `[start, end)` of a sample.

    `generated` tokens are trained; `versions` are the first and the last that sampled them. `prompt` is what the first
    request held. `context` is everything else that is not trained: what a tool, a user or the chat template added, and
    output that was masked (a record does not tell these apart).
    """

    kind: Kind
    start: int
    end: int
    versions: tuple[int, int] | None = None


def turns_of(sample: Sample) -> list[Turn]:
    """The turns of `sample`, in order, without gaps; none if its tokens were removed."""
    length = len(sample.input_ids)
    labels = [*sample.labels[:length], *([IGNORED_LABEL] * (length - len(sample.labels)))]
    turns: list[Turn] = []
    position = trained = 0
    for is_trained, run in groupby(labels, lambda label: label != IGNORED_LABEL):
        start, position = position, position + sum(1 for _ in run)
        if is_trained:
            versions = _versions(sample.version_spans, trained, trained + position - start)
            turns.append(Turn("generated", start, position, versions))
            trained += position - start
            continue
        prompt_end = min(position, sample.prompt_tokens) if start == 0 else start
        if prompt_end > start:
            turns.append(Turn("prompt", start, prompt_end))
        if position > prompt_end:
            turns.append(Turn("context", prompt_end, position))
    return turns


def _versions(spans: list[VersionSpan], start: int, end: int) -> tuple[int, int] | None:
    """First and last version of the trained tokens `[start, end)`."""
    own = [span.version for span in spans if span.start < end and span.end > start]
    return (own[0], own[-1]) if own else None
