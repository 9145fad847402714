"""Rollouts as text for the terminal. Pure; called by the command `samples`.

Every line of a model's text begins with a mark of ours and every control character in it is escaped, so no text can
look like a line of ours or drive the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pipelinerl.samples.printable import escaped, one_line, shortened
from pipelinerl.samples.view import EvaluationView, RolloutView, SampleView, TurnView

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
