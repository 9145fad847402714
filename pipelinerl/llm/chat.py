"""Conversations: messages in OpenAI's format, the ids that new ones add, and `Chat`, one growing token sequence."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pipelinerl.errors import RolloutError
from pipelinerl.llm.sample_builder import Transcript, Turn, text_of_call
from pipelinerl.llm.tokens import ChatRenderer, LLMCall, Prompt, ended_by_token, is_begun, sampled_text
from pipelinerl.llm.tool_calls import arguments_of
from pipelinerl.rollouts import STEP_REWARD, TrainingText

Message = dict[str, Any]


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, None, or a list of parts whose text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(
            part if isinstance(part, str) else str(part.get("text", ""))
            for part in content
            if isinstance(part, str | dict)
        )
    return str(content)


def for_template(message: Message) -> Message:
    """Return `message` as chat templates read it: text content, arguments of tool calls as dicts.

    Lone surrogates, which tokenizers reject, become question marks.
    """
    view = {key: value for key, value in message.items() if value is not None}
    view["content"] = text_of(message.get("content")).encode("utf-8", "replace").decode()
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        view["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": (call.get("function") or {}).get("name"), "arguments": arguments_of(call)},
            }
            for call in calls
            if isinstance(call, dict)
        ]
    else:
        view.pop("tool_calls", None)
    return view


def identity(message: Message) -> str:
    """Return a key that is equal for messages with the same meaning, however their client wrote them."""
    view = for_template(message)
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in view.get("tool_calls", [])]
    fields = [view.get("role"), view["content"].strip(), calls, view.get("tool_call_id")]
    return json.dumps(fields, sort_keys=True, default=str)


def assistant_message(content: str | None, tool_calls: list[dict[str, Any]] | None) -> Message:
    """Return the message of the model's answer."""
    message: Message = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def tool_message(tool_call: dict[str, Any] | str, content: Any) -> Message:
    """Return the message with a tool's result. `tool_call` is the call or its id; non-text content becomes JSON."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    if isinstance(tool_call, str):
        return {"role": "tool", "tool_call_id": tool_call, "content": text}
    name = (tool_call.get("function") or {}).get("name")
    return {"role": "tool", "tool_call_id": tool_call.get("id"), "name": name, "content": text}


def continue_ids(
    renderer: ChatRenderer, call: LLMCall, before: str, text: str, end_of_answer: Callable[[], list[int]] = list
) -> list[int]:
    """Return the ids of `text` after the answer of `call`.

    The sampled end token is already there, so it is not added again if `text` begins with it.

    Args:
        end_of_answer: returns the ids that the chat template writes at the end of an answer. The sampled end token
            replaces the template's, even if they differ.
    """
    ids = renderer.encode_after(before, text)
    if not ids or not ended_by_token(renderer, call):
        return ids
    is_there = ids[0] == call.output_token_ids[-1]
    if is_there or (renderer.is_special(ids[0]) and end_of_answer()[:1] == ids[:1]):
        return ids[1:]
    return ids


def without_sampled_stop(renderer: ChatRenderer, call: LLMCall, stops: str | Sequence[str] | None, text: str) -> str:
    """Return `text`, which follows an answer, without a repeated stop string.

    The stop string is not in the answer's text, but its ids were sampled, possibly with some characters after it.
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

    Works for any template: the answer is replaced by a marker, and what the template writes after the marker has to be
    added (end of the answer, new messages, start of the next answer). What it writes before that, with the real answer,
    must equal the text so far: some templates drop the reasoning of earlier turns, for instance. White space is
    ignored, since many templates trim, and the sampled ids are kept anyway.

    Args:
        past: messages before the answer, as the template saw them.
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
        return None  # the template requires tool calls in its own format: the caller renders the whole chat
    _, found, tail = marked.partition(marker)
    if not found or marker in tail or not real.endswith(tail):
        return None
    if "".join(real[: len(real) - len(tail)].split()) != "".join(text_so_far.split()):
        return None

    def end_of_answer() -> list[int]:
        try:
            text = renderer.render_text([*past, marked_answer], tools, add_generation_prompt=False)
        except RolloutError:
            return []  # the template rejects chats that end with an answer
        return renderer.encode(text.rpartition(marker)[2])

    return tail, continue_ids(renderer, call, answer, tail, end_of_answer)


#: Called with a prompt, its text and ids, and sampling parameters of this request; returns the answer.
Generate = Callable[[Prompt, str, list[int], dict[str, Any]], Awaitable[LLMCall]]


class Chat:
    """One conversation as one growing token sequence; made by `llm.chat(session)`.

    Every prompt consists of the ids of the last prompt and answer, followed by the ids of the new messages. If the
    template rewrites the past, a new sequence starts. `messages` is the whole conversation in OpenAI's format;
    `transcripts` are its token sequences.

    Args:
        messages: the beginning of the chat, for instance a system message.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        generate: Generate,
        tools: Sequence[dict[str, Any]] | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        self._renderer = renderer
        self._generate = generate
        self.tools = list(tools) if tools else None
        self.messages: list[Message] = []
        self.transcripts: list[Transcript] = []
        self._past: list[Message] = []  # as the template saw it, up to the last answer
        self._new: list[Message] = []  # as the template will see it, since the last answer
        self.add(*messages)

    @property
    def turns(self) -> list[Turn]:
        """All turns so far, in order."""
        return [turn for transcript in self.transcripts for turn in transcript.turns]

    def add(self, *messages: Message | str) -> None:
        """Add messages for the next turn; a string is a user message."""
        for message in messages:
            whole = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
            self.messages.append(whole)
            self._new.append(for_template(whole))

    def add_tool_result(self, tool_call: dict[str, Any] | str, content: Any) -> None:
        """Add a tool's result. `tool_call` is the call or its id; non-text content is written as JSON."""
        self.add(tool_message(tool_call, content))

    async def ask(self, *messages: Message | str, parameters: dict[str, Any] | None = None) -> LLMCall:
        """Add `messages`, sample an answer, and return its call; tool calls are in `call.output.tool_calls`.

        Args:
            parameters: sampling parameters of this turn only (`max_tokens`, `stop`); the temperature stays.

        Raises:
            RolloutError: as for `llm_async_generate`. After `context_overflow` (nothing was sent) the turns so far can
                still be trained: catch it and return `training_texts` as usual.
        """
        self.add(*messages)
        past, transcript, text, ids = self._next_prompt()
        call = await self._generate(Prompt(list(self.messages), self.tools), text, ids, parameters or {})
        transcript.add(call, text + sampled_text(self._renderer, call))
        if len(transcript.turns) == 1:
            self.transcripts.append(transcript)
        content = call.output.content or ""
        if is_begun(self._new[-1:]):  # the answer continues this message: they are one
            content = self._new.pop()["content"] + content
            self.messages.pop()
        self._past = [*past, *self._new]
        self._new = []
        self.messages.append(assistant_message(content, call.output.tool_calls))
        return call

    def reward_turn(self, reward: float) -> None:
        """Reward the last turn by itself: each turn is then a sample, with the discounted sum of later rewards."""
        if not self.turns:
            raise ValueError("reward_turn: got a chat without a turn, expected an answer to reward. Call ask() first.")
        last = self.turns[-1]
        last.reward = reward + (last.reward or 0.0)

    def training_texts(self, reward: float | None = None, *, by_turn: bool = False) -> list[TrainingText]:
        """Return the samples of this chat; every sampled token is trained exactly once.

        There is one sample per sequence, or, with `by_turn` or rewards of turns, one per turn. With rewards of turns,
        `reward` is added to the last turn's. Without any reward the caller has to set it.
        """
        turns = self.turns
        if any(turn.reward is not None for turn in turns):
            texts = [text_of_call(turn.call) for turn in turns]
            rewards = [turn.reward or 0.0 for turn in turns]
            rewards[-1] += reward or 0.0
            for text, own in zip(texts, rewards, strict=True):
                text.reward = own
                text.metadata[STEP_REWARD] = True
            return texts
        if by_turn:
            return [text_of_call(turn.call, reward) for turn in turns]
        return [transcript.training_text(reward) for transcript in self.transcripts]

    def _next_prompt(self) -> tuple[list[Message], Transcript, str, list[int]]:
        """Return the messages before the new ones, the sequence to extend, and text and ids of the next prompt.

        The template sees answers as they were sampled, or in OpenAI's format if it cannot read them.
        """
        renderer = self._renderer
        past = self._past
        if self.transcripts:
            transcript = self.transcripts[-1]
            call = transcript.turns[-1].call
            more = continuation(renderer, past, call, self._new, self.tools, transcript.text)
            if more is not None:
                past = [*past, {"role": "assistant", "content": sampled_text(renderer, call)}]
                return past, transcript, transcript.text + more[0], [*transcript.ids, *more[1]]
            past = [*past, for_template(self.messages[len(self.messages) - len(self._new) - 1])]
        fresh = Transcript()
        try:
            return past, fresh, *renderer.render([*past, *self._new], self.tools)
        except RolloutError:
            # This template requires tool calls before their results: use OpenAI's format for every answer.
            past = [for_template(message) for message in self.messages[: len(self.messages) - len(self._new)]]
            return past, fresh, *renderer.render([*past, *self._new], self.tools)
