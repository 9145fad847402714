"""What is shown of a rollout, for the terminal and as JSON alike. Pure; called by the command `samples`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from pipelinerl.samples.decode import TokenText
from pipelinerl.samples.printable import shortened
from pipelinerl.samples.recorded import StoredRollout, StoredSample
from pipelinerl.samples.turns import Kind, turns_of

PENDING = "pending"


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """`text` and `text_end` are the two ends of a text from whose middle `cut_chars` were left out. No text: None."""

    kind: Kind
    token_ids: list[int]
    first_version: int | None
    last_version: int | None
    text: str | None
    text_end: str
    cut_chars: int


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    """`masked_tokens` were sampled and are not trained. `fate` is what became of the sample."""

    sample_id: str
    reward: float
    finished: bool
    finish_reason: str
    first_version: int | None
    last_version: int | None
    prompt_tokens: int
    output_tokens: int
    trained_tokens: int
    masked_tokens: int
    tokens_removed: bool
    temperature: float
    fate: str
    metadata: dict[str, Any]
    turns: list[TurnView]


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """`reward`, `success`, `latency_s` and `metrics` are those that the rollout reported; None: it is not known."""

    dataset: str
    problem_id: str
    group_id: str
    rollout_id: str
    incarnation: int
    reward: float | None
    success: bool | None
    latency_s: float | None
    metrics: dict[str, float]
    samples: list[SampleView]


def view_of(rollout: StoredRollout, decoder: TokenText | None, fates: Mapping[str, str], max_chars: int) -> RolloutView:
    """What to show of `rollout`; of each text at most `max_chars` characters (0: all)."""
    group, summary = rollout.group, rollout.summary
    return RolloutView(
        dataset=group.dataset_name,
        problem_id=group.problem_id,
        group_id=group.id,
        rollout_id=rollout.rollout_id,
        incarnation=group.incarnation,
        reward=summary.reward if summary else None,
        success=summary.success if summary else None,
        latency_s=summary.latency_s if summary else None,
        metrics=summary.metrics if summary else {},
        samples=[_sample(each, decoder, fates.get(each.id, PENDING), max_chars) for each in rollout.samples],
    )


def _sample(sample: StoredSample, decoder: TokenText | None, fate: str, max_chars: int) -> SampleView:
    versions = [span.version for span in sample.version_spans]
    trained = sum(span.end - span.start for span in sample.version_spans)
    return SampleView(
        sample_id=sample.id,
        reward=sample.reward,
        finished=sample.finished,
        finish_reason=sample.finish_reason,
        first_version=versions[0] if versions else None,
        last_version=versions[-1] if versions else None,
        prompt_tokens=sample.prompt_tokens,
        output_tokens=sample.output_tokens,
        trained_tokens=trained,
        masked_tokens=max(0, sample.output_tokens - trained),
        tokens_removed=not sample.input_ids,
        temperature=sample.temperature,
        fate=fate,
        metadata=sample.metadata,
        turns=_turns(sample, decoder, max_chars),
    )


def _turns(sample: StoredSample, decoder: TokenText | None, max_chars: int) -> list[TurnView]:
    views = []
    for turn in turns_of(sample):
        text, text_end, cut = None, "", 0
        if decoder is not None:
            text, text_end, cut = shortened(decoder.part(sample.input_ids, turn.start, turn.end), max_chars)
        first, last = turn.versions or (None, None)
        views.append(
            TurnView(
                kind=turn.kind,
                token_ids=sample.input_ids[turn.start : turn.end],
                first_version=first,
                last_version=last,
                text=text,
                text_end=text_end,
                cut_chars=cut,
            )
        )
    return views


def json_lines(view: RolloutView) -> list[str]:
    """One JSON object for each sample, with what is known of its rollout; a rollout without samples has one as well.

    Pure ASCII without control characters, so that it can be looked at in a terminal.
    """
    rollout = {
        **{name: getattr(view, name) for name in ("dataset", "problem_id", "group_id", "rollout_id", "incarnation")},
        "rollout_reward": view.reward,
        **{name: getattr(view, name) for name in ("success", "latency_s", "metrics")},
    }
    if not view.samples:
        return [_dump({**rollout, "sample_id": None})]
    return [_dump({**rollout, **_json_sample(sample)}) for sample in view.samples]


def _json_sample(sample: SampleView) -> dict[str, Any]:
    turns = [
        {
            "kind": turn.kind,
            "trained": turn.kind == "generated",
            "first_version": turn.first_version,
            "last_version": turn.last_version,
            "text": _joined(turn),
            "cut_chars": turn.cut_chars,
            "token_ids": turn.token_ids,
        }
        for turn in sample.turns
    ]
    texts = [text for turn in sample.turns if (text := _joined(turn)) is not None]
    whole = "".join(texts) if texts and len(texts) == len(turns) else None
    return {**msgspec.to_builtins(sample), "turns": turns, "text": whole}


def _joined(turn: TurnView) -> str | None:
    if turn.text is None or not turn.cut_chars:
        return turn.text
    return f"{turn.text}...({turn.cut_chars} characters cut)...{turn.text_end}"


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=True, default=str).replace("\x7f", "\\u007f")
