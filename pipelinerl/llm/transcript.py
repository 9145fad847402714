"""Requests and answers as token sequences that only grow, and the ids that new messages add to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.errors import RolloutError
from pipelinerl.llm.client import is_finished
from pipelinerl.llm.tokens import ChatRenderer, opened_thinking
from pipelinerl.records import IGNORED_LABEL, VersionSpan
from pipelinerl.rollouts import TrainingText


@dataclass(slots=True)
class Prompt:
    """A chat (`messages` in OpenAI format, with optional `tools`), or `token_ids`, sent as they are."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


@dataclass(slots=True)
class LLMOutput:
    """The model's answer as text, without special tokens and without the stop string that ended it."""

    content: str | None = None
    role: str = "assistant"
    tool_calls: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class LLMCall:
    """One answered request.

    `output_token_ids` and `logprobs` (natural logs, of the sampling distribution) have one entry per sampled token;
    `version_spans` cover them without gaps. Ids are the server's own, never re-tokenized text.
    """

    prompt: Prompt
    output: LLMOutput
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version_spans: list[VersionSpan]
    prompt_text: str | None = None
    output_text: str = ""
    ended_by_stop_string: bool = False

    @property
    def graded_text(self) -> str:
        """The answer as graders read it: if the prompt ended with `<think>`, that comes first."""
        return opened_thinking(self.prompt_text) + (self.output.content or "")

    @property
    def prompt_length_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_length_tokens(self) -> int:
        return len(self.output_token_ids)


@dataclass(slots=True)
class Turn:
    """Output tokens `[start, end)` of the sequence, the call that sampled them and the reward of this turn, if any."""

    start: int
    end: int
    call: LLMCall
    reward: float | None = None


@dataclass(slots=True)
class Transcript:
    """One growing sequence. `ids` are the last prompt and its answer; `text` is the same in the template's words."""

    temperature: float
    ids: list[int] = field(default_factory=list)
    text: str = ""
    turns: list[Turn] = field(default_factory=list)

    def add(self, call: LLMCall, text: str) -> None:
        """Add a call whose prompt begins with all ids so far.

        Args:
            call: its ids are kept as they are.
            text: prompt and answer as text.

        Raises:
            ValueError: the prompt does not begin with the ids so far.
        """
        known = len(self.ids)
        if call.prompt_token_ids[:known] != self.ids:
            raise ValueError(f"a prompt of {len(call.prompt_token_ids)} ids does not extend the {known} ids so far")
        start = len(call.prompt_token_ids)
        self.ids = [*call.prompt_token_ids, *call.output_token_ids]
        self.text = text
        self.turns.append(Turn(start=start, end=len(self.ids), call=call))

    def training_text(self, reward: float | None = None) -> TrainingText:
        """Return one sample in which exactly the sampled tokens of all turns are trained.

        Tokens are masked by position, never by id: end tokens and stop strings were sampled and are trained.
        """
        labels = [IGNORED_LABEL] * len(self.ids)
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        trained = 0
        for turn in self.turns:
            labels[turn.start : turn.end] = self.ids[turn.start : turn.end]
            logprobs.extend(turn.call.logprobs)
            _append_spans(spans, turn.call.version_spans, trained)
            trained += turn.end - turn.start
        last = self.turns[-1].call
        return TrainingText(
            text=self.text,
            n_predicted=min(len(last.output_text), len(self.text)),
            reward=reward,
            logprobs=logprobs,
            input_ids=list(self.ids),
            labels=labels,
            finished=is_finished(last.finish_reason),
            finish_reason=last.finish_reason,
            prompt_tokens=self.turns[0].start,
            output_tokens=trained,
            metadata={"turns": len(self.turns)},
            version_spans=spans,
            temperature=self.temperature,
        )


def _append_spans(spans: list[VersionSpan], more: list[VersionSpan], offset: int) -> None:
    """Append `more`, shifted by `offset`; neighbors of one version become one span."""
    for span in more:
        start, end = span.start + offset, span.end + offset
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(span.version, start, end))


def sampled_text(renderer: ChatRenderer, call: LLMCall) -> str:
    """Return the answer as a template would have to write it: special tokens kept, without the one that ended it."""
    ids = call.output_token_ids
    if _ended_by_token(renderer, call):
        ids = ids[:-1]
    return renderer.decode(ids, skip_special_tokens=False)


def _ended_by_token(renderer: ChatRenderer, call: LLMCall) -> bool:
    """Return whether the last sampled id is a special token that ended the answer (no stop string, no limit)."""
    ended = call.finish_reason == "stop" and not call.ended_by_stop_string
    return ended and renderer.is_special(call.output_token_ids[-1])


def continue_ids(
    renderer: ChatRenderer, call: LLMCall, before: str, text: str, end_of_answer: Callable[[], list[int]] = list
) -> list[int]:
    """Return the ids of `text` after the answer of `call`.

    The sampled end token is already there: if `text` begins with the same token, it is not added again.

    Args:
        renderer: the tokenizer.
        call: the last answered request.
        before: text of its answer.
        text: what follows.
        end_of_answer: returns the ids that a chat template writes at the end of an answer. The sampled end token
            replaces the template's, even if it is a different one.
    """
    ids = renderer.encode_after(before, text)
    if not ids or not _ended_by_token(renderer, call):
        return ids
    is_there = ids[0] == call.output_token_ids[-1]
    if is_there or (renderer.is_special(ids[0]) and end_of_answer()[:1] == ids[:1]):
        return ids[1:]
    return ids


def without_sampled_stop(renderer: ChatRenderer, call: LLMCall, stops: str | Sequence[str] | None, text: str) -> str:
    """Return `text`, which follows an answer, without a repeated stop string.

    The stop string is missing in the answer's text but its ids were sampled, possibly with some characters after it.

    Args:
        renderer: the tokenizer.
        call: the last answered request.
        stops: stop strings of the request.
        text: what follows.
    """
    if not call.ended_by_stop_string:
        return text
    sampled = renderer.decode(call.output_token_ids)[len(call.output_text) :]
    for ending in (sampled, *([stops] if isinstance(stops, str) else stops or [])):
        if ending and sampled.startswith(ending) and text.startswith(ending):
            return text[len(ending) :]
    return text


def continuation(
    renderer: ChatRenderer,
    past: Sequence[dict[str, Any]],
    call: LLMCall,
    new: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    text_so_far: str,
) -> tuple[str, list[int]] | None:
    """Return text and ids that `new` adds after the answer of `call`, or None if the template rewrites the past.

    Works for any template: the answer is replaced by a marker, and what the template writes after the marker is what
    has to be added (end of the answer, new messages, start of the next answer). What it writes before that, with the
    real answer, must equal the text so far; some templates drop the reasoning of earlier turns, for instance. White
    space is ignored, since many templates trim and the sampled ids are kept anyway.

    Args:
        renderer: template and tokenizer.
        past: messages before the answer, as the template saw them.
        call: the last answered request.
        new: messages after the answer.
        tools: of the chat.
        text_so_far: last prompt and answer, as the template writes them.
    """
    answer = sampled_text(renderer, call)
    marker = "answer-stands-here"
    while marker in text_so_far or any(marker in str(message.get("content")) for message in new):
        marker += "-x"
    marked_answer = {"role": "assistant", "content": marker}
    try:
        opens = None if new else True  # without a new message, another turn follows the answer
        answered = [*past, {"role": "assistant", "content": answer}, *new]
        real = renderer.render_text(answered, tools, add_generation_prompt=opens)
        marked = renderer.render_text([*past, marked_answer, *new], tools, add_generation_prompt=opens)
    except RolloutError:
        return None  # the template wants tool calls in its own form: the caller renders the whole chat
    _, found, tail = marked.partition(marker)
    if not found or marker in tail or not real.endswith(tail):
        return None
    if "".join(real[: len(real) - len(tail)].split()) != "".join(text_so_far.split()):
        return None

    def end_of_answer() -> list[int]:
        try:
            text = renderer.render_text([*past, marked_answer], tools, add_generation_prompt=False)
        except RolloutError:
            return []  # the template refuses chats that end with an answer
        return renderer.encode(text.rpartition(marker)[2])

    return tail, continue_ids(renderer, call, answer, tail, end_of_answer)
