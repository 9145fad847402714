"""The ids that new messages add to a sequence, for any chat template; or that the template has rewritten the past.

Called by the chat before every turn but the first. Pure, but for the template.

The answer of the last turn is replaced by a marker, and what the template writes behind the marker is what has to be
added: the end of the answer, the new messages, the start of the next answer. With the answer itself in its place, what
stands before that must be the text so far, or else the template has changed it (some drop the reasoning of earlier
turns). White space does not count: many templates trim, and the ids that the model saw are kept anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelinerl.errors import RolloutError
from pipelinerl.llm.chat import ChatRenderer
from pipelinerl.llm.types import LLMCall

if TYPE_CHECKING:
    from pipelinerl.llm.trainable import TrainableLLM


@dataclass(frozen=True, slots=True)
class Continuation:
    """What comes after the sampled ids: as the template writes it, and as ids."""

    text: str
    ids: list[int]


def sampled_text(renderer: ChatRenderer, call: LLMCall) -> str:
    """Return the answer as a template would have to write it: special tokens kept, without the one that ended it."""
    ids = call.output_token_ids
    if ended_by_token(renderer, call):
        ids = ids[:-1]
    return renderer.decode(ids, skip_special_tokens=False)


def ended_by_token(renderer: ChatRenderer, call: LLMCall) -> bool:
    """Return whether the last sampled id is a special token that ended the answer (no stop string, no limit)."""
    ended = call.finish_reason == "stop" and not call.ended_by_stop_string
    return ended and renderer.is_special(call.output_token_ids[-1])


def continue_ids(
    renderer: ChatRenderer, call: LLMCall, before: str, text: str, end_of_answer: Callable[[], list[int]] = list
) -> list[int]:
    """Return the ids of `text` behind the answer of `call`, whose own text is `before`.

    The end token that was sampled is there already: a text that begins with the same token adds it no second time.

    Args:
        renderer: the tokenizer.
        call: the last answered request.
        before: text of its answer.
        text: what follows.
        end_of_answer: gives the ids with which `text` itself ends the answer, where that is known (a chat template).
            The sampled end token stands in the place of theirs, also if it is another one.
    """
    ids = renderer.encode_after(before, text)
    if not ids or not ended_by_token(renderer, call):
        return ids
    is_there = ids[0] == call.output_token_ids[-1]
    if is_there or (renderer.is_special(ids[0]) and end_of_answer()[:1] == ids[:1]):
        return ids[1:]
    return ids


def without_sampled_stop(llm: TrainableLLM, call: LLMCall, text: str) -> str:
    """Return what `text` adds to an answer whose text leaves the stop string out, and whose ids do not.

    Where `text` repeats the stop string (or what its last token brought along), that is taken away.
    """
    if not call.ended_by_stop_string:
        return text
    sampled = llm.renderer.decode(call.output_token_ids)[len(call.output_text) :]
    stops = llm.parameters.get("stop") or []
    for ending in (sampled, *([stops] if isinstance(stops, str) else stops)):
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
) -> Continuation | None:
    """Return what `new` adds after the answer of `call`, or None when the sequence cannot simply grow.

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
    try:
        real = renderer.render_text([*past, {"role": "assistant", "content": answer}, *new], tools)
        marked = renderer.render_text([*past, {"role": "assistant", "content": marker}, *new], tools)
    except RolloutError:
        return None  # the template wants tool calls in its own form; the whole chat is rendered anew
    _, found, tail = marked.partition(marker)
    if not found or marker in tail or not real.endswith(tail):
        return None
    if _squeezed(real[: len(real) - len(tail)]) != _squeezed(text_so_far):
        return None
    end = functools.partial(_end_of_answer, renderer, past, marker, tools)
    return Continuation(text=tail, ids=continue_ids(renderer, call, answer, tail, end))


def _end_of_answer(
    renderer: ChatRenderer, past: Sequence[dict[str, Any]], marker: str, tools: Sequence[dict[str, Any]] | None
) -> list[int]:
    """Return the ids that the template writes behind an answer that is the last message; none if it cannot."""
    last = {"role": "assistant", "content": marker}
    try:
        text = renderer.render_text([*past, last], tools, add_generation_prompt=False)
    except RolloutError:
        return []
    return renderer.encode(text.rpartition(marker)[2])


def _squeezed(text: str) -> str:
    return "".join(text.split())
