"""Recorded rollouts as text for the terminal, and as JSON.

Every line of a model's text begins with a mark of ours and its control characters are escaped, so no text can look like
a line of ours or drive the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import msgspec

from pipelinerl.analysis.select import StoredRollout
from pipelinerl.analysis.token_text import TokenText, escaped, one_line, shortened
from pipelinerl.records import IGNORED_LABEL, EvaluationRollout, EvaluationSample, RolloutSummary, Sample, VersionSpan

Kind = Literal["prompt", "context", "generated"]


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """Tokens `[start, end)` of a sample.

    `generated` tokens are trained; `versions` are the first and the last that sampled them. `prompt` is what the first
    request held. `context` is everything else that is not trained: what a tool, a user or the chat template added, and
    output that was masked (a record does not tell these apart).
    """

    kind: Kind
    start: int
    end: int
    versions: tuple[int, int] | None = None


def turns_of(sample: Sample) -> list[SampleTurn]:
    """The turns of `sample`, in order, without gaps; none if its tokens were removed."""
    length = len(sample.input_ids)
    labels = [*sample.labels[:length], *([IGNORED_LABEL] * (length - len(sample.labels)))]
    turns: list[SampleTurn] = []
    position = trained = 0
    for is_trained, run in groupby(labels, lambda label: label != IGNORED_LABEL):
        start, position = position, position + sum(1 for _ in run)
        if is_trained:
            versions = _token_versions(sample.version_spans, trained, trained + position - start)
            turns.append(SampleTurn("generated", start, position, versions))
            trained += position - start
            continue
        prompt_end = min(position, sample.prompt_tokens) if start == 0 else start
        if prompt_end > start:
            turns.append(SampleTurn("prompt", start, prompt_end))
        if position > prompt_end:
            turns.append(SampleTurn("context", prompt_end, position))
    return turns


def _token_versions(spans: list[VersionSpan], start: int, end: int) -> tuple[int, int] | None:
    """First and last version of the trained tokens `[start, end)`."""
    own = [span.version for span in spans if span.start < end and span.end > start]
    return (own[0], own[-1]) if own else None


PENDING = "pending"
FATE = "not trained"


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


LEGEND = "Lines with > are what the model generated and is trained on, lines with | are what it was given (or masked)."
EVALUATION_LEGEND = (
    "Lines with > are what the model generated, lines with | are what it was given (or masked). Nothing is trained."
)
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_MARKS = {"prompt": "|", "context": "|", "generated": ">"}
_NAMES = {"prompt": "prompt", "context": "context, not trained", "generated": "generated"}
# Of the lines that say what a rollout is; the numbers in them come from user code.
_MAX_LINE = 2000


class Painter:
    """Emphasis for a terminal; nothing at all with `is_on=False`."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def bold(self, text: str) -> str:
        return f"{_BOLD}{text}{_RESET}" if self._is_on else text

    def dim(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self._is_on else text


def render(view: RolloutView, painter: Painter) -> str:
    """One rollout with all its samples."""
    lines = [painter.bold(_line(_title(view)))]
    lines += [f"  {_line(each)}" for each in _about(view)]
    for sample in view.samples:
        lines += [f"  {_line(each)}" for each in _about_sample(sample)]
        for turn in sample.turns:
            lines += _turn(turn, painter)
    return "\n".join(lines)


def _line(text: str) -> str:
    head, tail, cut = shortened(one_line(text), _MAX_LINE)
    return f"{head} ...({cut} characters)... {tail}" if cut else head


def _title(view: RolloutView) -> str:
    of_training = "" if view.evaluation is not None else f"group {view.group_id}, "
    return f"rollout {view.rollout_id}: data set {view.dataset}, {of_training}problem {view.problem_id}"


def _about(view: RolloutView) -> Iterator[str]:
    if view.evaluation is not None:
        yield from _about_evaluation(view.evaluation)
    if view.reward is not None:
        success = "" if view.success is None else f", {'success' if view.success else 'no success'}"
        took = "" if view.latency_s is None else f", {view.latency_s:.1f} s"
        yield f"reward {view.reward:g}{success}{took}"
    metrics = {name: value for name, value in view.metrics.items() if name not in ("reward", "success")}
    if metrics:
        yield "metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items())
    if not view.samples and view.evaluation is None:
        yield "no samples: nothing of this rollout can be trained on"
    elif not view.samples and not (view.evaluation and view.evaluation.failure):
        yield "no texts: the rollout returned none, or none that can be recorded"


def _about_evaluation(evaluation: EvaluationView) -> Iterator[str]:
    final = "the final evaluation, " if evaluation.is_final else ""
    sampled = _versions(evaluation.min_version, evaluation.max_version)
    by = "" if evaluation.min_version is None else f", sampled by {sampled}"
    yield f"{final}due at version {evaluation.due_version}{by}"
    if not evaluation.has_result:
        yield "NO RESULT of this evaluation: it still runs, was cut off, or failed as a whole"
    yield f"problem: {evaluation.problem}"
    if evaluation.failure:
        yield f"FAILED: {evaluation.failure}"
        if evaluation.message:
            yield f"message: {evaluation.message}"


def _about_sample(sample: SampleView) -> Iterator[str]:
    versions = _versions(sample.first_version, sample.last_version)
    tokens = f"{sample.prompt_tokens} prompt + {sample.output_tokens} output tokens"
    yield f"sample {sample.sample_id}: reward {sample.reward:g}, {versions}, {tokens}, {sample.fate}"
    flags = [f"finish reason {sample.finish_reason}"]
    if not sample.finished:
        flags.append("TRUNCATED: the model did not end it")
    if sample.masked_tokens:
        flags.append(f"MASKED: {sample.masked_tokens} of its output tokens are not trained")
    if sample.tokens_removed:
        flags.append("no text: its tokens were removed (streams.retention=heads)")
    yield ", ".join(flags)
    if sample.metadata:
        yield f"metadata: {json.dumps(sample.metadata, ensure_ascii=False, default=str)}"


def _versions(first: int | None, last: int | None) -> str:
    if first is None:
        return "no version"
    return f"version {first}" if first == last else f"versions {first}..{last}"


def _turn(turn: TurnView, painter: Painter) -> Iterator[str]:
    count = len(turn.token_ids)
    by = "" if turn.first_version is None else f", {_versions(turn.first_version, turn.last_version)}"
    yield painter.dim(f"  {_NAMES[turn.kind]} ({count} token{'s' * (count != 1)}{by})")
    if turn.text is None:
        return
    yield from _text(turn.text, turn, painter)
    if turn.cut_chars:
        yield f"  ~ {turn.cut_chars} characters are not shown here (--max-chars 0 shows all)"
        if turn.text_end:
            yield from _text(turn.text_end, turn, painter)


def _text(text: str, turn: TurnView, painter: Painter) -> Iterator[str]:
    mark = _MARKS[turn.kind]
    for line in escaped(text).split("\n"):
        shown = f"  {mark} {line}".rstrip(" ") if not line else f"  {mark} {line}"
        yield shown if turn.kind == "generated" else painter.dim(shown)


def view_of_evaluation(
    rollout: EvaluationRollout, has_result: bool, decoder: TokenText | None, max_chars: int
) -> RolloutView:
    """What to show of `rollout`; of each text at most `max_chars` characters (0: all)."""
    return rollout_view(
        dataset=rollout.dataset_name,
        problem_id=rollout.problem_id,
        group_id=rollout.group_id,
        rollout_id=rollout.id,
        incarnation=rollout.incarnation,
        summary=rollout.summary,
        samples=[_sample(each, decoder, max_chars) for each in rollout.samples],
        evaluation=EvaluationView(
            due_version=rollout.due_version,
            is_final=rollout.is_final,
            has_result=has_result,
            min_version=rollout.min_version,
            max_version=rollout.max_version,
            problem=rollout.problem,
            failure=rollout.failure,
            message=rollout.message,
        ),
    )


def _sample(sample: EvaluationSample, decoder: TokenText | None, max_chars: int) -> Any:
    texts = (sample.prompt_text, sample.output_text) if not sample.input_ids else None
    return sample_view(sample, decoder, FATE, max_chars, is_trained=False, texts=texts)
