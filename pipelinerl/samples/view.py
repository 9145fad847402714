"""What is shown of a rollout, for the terminal and as JSON alike. Pure; called by the command `samples`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from pipelinerl.records import IGNORED_LABEL, RolloutSummary, Sample
from pipelinerl.samples.decode import TokenText
from pipelinerl.samples.printable import shortened
from pipelinerl.samples.recorded import StoredRollout
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


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rollout of an evaluation besides. `has_result`: its evaluation came to its end."""

    due_version: int
    is_final: bool
    has_result: bool
    min_version: int | None
    max_version: int | None
    problem: str
    failure: str
    message: str


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """`reward`, `success`, `latency_s` and `metrics` are those that the rollout reported; None: it is not known.

    `evaluation`: None for a rollout of training.
    """

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
    evaluation: EvaluationView | None = None


def view_of(rollout: StoredRollout, decoder: TokenText | None, fates: Mapping[str, str], max_chars: int) -> RolloutView:
    """What to show of `rollout`; of each text at most `max_chars` characters (0: all)."""
    group = rollout.group
    return rollout_view(
        dataset=group.dataset_name,
        problem_id=group.problem_id,
        group_id=group.id,
        rollout_id=rollout.rollout_id,
        incarnation=group.incarnation,
        summary=rollout.summary,
        samples=[sample_view(each, decoder, fates.get(each.id, PENDING), max_chars) for each in rollout.samples],
    )


def rollout_view(
    *,
    dataset: str,
    problem_id: str,
    group_id: str,
    rollout_id: str,
    incarnation: int,
    summary: RolloutSummary | None,
    samples: list[SampleView],
    evaluation: EvaluationView | None = None,
) -> RolloutView:
    """A rollout of training or of an `evaluation`, with what its `summary` reported."""
    return RolloutView(
        dataset=dataset,
        problem_id=problem_id,
        group_id=group_id,
        rollout_id=rollout_id,
        incarnation=incarnation,
        reward=summary.reward if summary else None,
        success=summary.success if summary else None,
        latency_s=summary.latency_s if summary else None,
        metrics=summary.metrics if summary else {},
        samples=samples,
        evaluation=evaluation,
    )


def sample_view(
    sample: Sample,
    decoder: TokenText | None,
    fate: str,
    max_chars: int,
    is_trained: bool = True,
    texts: tuple[str, str] | None = None,
) -> SampleView:
    """What to show of `sample`.

    Args:
        decoder: of token ids; None: there are no texts.
        fate: what became of it.
        max_chars: of each text; 0: all.
        is_trained: whether the tokens with a label were sampled to be trained.
        texts: prompt and output of a sample without ids.
    """
    versions = [span.version for span in sample.version_spans]
    trained = sum(span.end - span.start for span in sample.version_spans)
    if not is_trained:
        # Texts of an evaluation need no versions.
        trained = len(sample.labels) - sample.labels.count(IGNORED_LABEL) if texts is None else sample.output_tokens
    return SampleView(
        sample_id=sample.id,
        reward=sample.reward,
        finished=sample.finished,
        finish_reason=sample.finish_reason,
        first_version=versions[0] if versions else None,
        last_version=versions[-1] if versions else None,
        prompt_tokens=sample.prompt_tokens,
        output_tokens=sample.output_tokens,
        trained_tokens=trained if is_trained else 0,
        masked_tokens=max(0, sample.output_tokens - trained),
        tokens_removed=texts is None and not sample.input_ids,
        temperature=sample.temperature,
        fate=fate,
        metadata=sample.metadata,
        turns=_turns(sample, decoder, max_chars) if texts is None else _text_turns(texts, max_chars),
    )


def _text_turns(texts: tuple[str, str], max_chars: int) -> list[TurnView]:
    kinds: tuple[Kind, Kind] = ("prompt", "generated")
    views = []
    for kind, whole in zip(kinds, texts, strict=True):
        text, text_end, cut = shortened(whole, max_chars)
        views.append(
            TurnView(
                kind=kind,
                token_ids=[],
                first_version=None,
                last_version=None,
                text=text,
                text_end=text_end,
                cut_chars=cut,
            )
        )
    return views


def _turns(sample: Sample, decoder: TokenText | None, max_chars: int) -> list[TurnView]:
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
    if view.evaluation is not None:
        rollout |= msgspec.to_builtins(view.evaluation)
    if not view.samples:
        return [_dump({**rollout, "sample_id": None})]
    return [_dump({**rollout, **_json_sample(sample, view.evaluation is None)}) for sample in view.samples]


def _json_sample(sample: SampleView, is_trained: bool) -> dict[str, Any]:
    turns = [
        {
            "kind": turn.kind,
            "trained": is_trained and turn.kind == "generated",
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
