"""`Chat`: a conversation with the model as one growing token sequence. Made by `llm.chat(session)` in rollouts.

Every prompt is the ids of the last prompt and answer, and the ids of the new messages. Where the template rewrites the
past, a new sequence starts. `ask` waits for the server.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from pipelinerl.errors import RolloutError
from pipelinerl.llm.continuation import continuation, sampled_text
from pipelinerl.llm.generate import answer_of
from pipelinerl.llm.messages import Message, assistant_message, for_template, tool_message
from pipelinerl.llm.sample_builder import make_training_text
from pipelinerl.llm.transcript import Transcript, Turn
from pipelinerl.llm.types import LLMCall, Prompt

if TYPE_CHECKING:
    from pipelinerl.llm.trainable import TrainableLLM
    from pipelinerl.rollouts import TrainingText

STEP_REWARD = "step_reward"


class Chat:
    """One conversation. `messages` is all of it in OpenAI's format; `transcripts` are its token sequences.

    Args:
        llm: the server and how to sample from it.
        session: for the requests.
        tools: tools in OpenAI's format, given to the chat template.
        messages: the beginning of the chat, for instance a system message.
    """

    def __init__(
        self,
        llm: TrainableLLM,
        session: aiohttp.ClientSession,
        tools: Sequence[dict[str, Any]] | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        self._llm = llm
        self._session = session
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
        """Add messages for the next turn; a text is a message of the user."""
        for message in messages:
            whole = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
            self.messages.append(whole)
            self._new.append(for_template(whole))

    def add_tool_result(self, tool_call: dict[str, Any] | str, content: Any) -> None:
        """Add what a tool answered; content that is no text is written as JSON."""
        self.add(tool_message(tool_call, content))

    async def ask(self, *messages: Message | str, parameters: dict[str, Any] | None = None) -> LLMCall:
        """Add `messages`, let the model answer, and return its call; tool calls are in `call.output.tool_calls`.

        Args:
            messages: as for `add`.
            parameters: sampling parameters of this turn only (`max_tokens`, `stop`); the temperature stays.

        Raises:
            RolloutError: as for `llm_async_generate`. After `context_overflow` (nothing was sent) the turns so far can
                still be trained: catch it, and return `training_texts` as usual.
        """
        self.add(*messages)
        llm = self._llm
        if parameters:
            llm = copy.copy(llm)
            llm.parameters = {**llm.parameters, **parameters, "temperature": llm.parameters.get("temperature", 1.0)}
        past, grown = self._grow()
        if grown is None:
            transcript = Transcript(temperature=float(llm.parameters.get("temperature", 1.0)))
            past, text, ids = self._render(past)
        else:
            transcript, text, ids = grown
        call = await answer_of(llm, Prompt(messages=list(self.messages), tools=self.tools), text, ids, self._session)
        transcript.add(call, text + sampled_text(llm.renderer, call))
        if grown is None:
            self.transcripts.append(transcript)
        self._past = [*past, *self._new]
        self._new = []
        self.messages.append(assistant_message(call.output.content or "", call.output.tool_calls))
        return call

    def reward_turn(self, reward: float) -> None:
        """Reward the last turn by itself. Samples are then one for each turn, with discounted sums of what follows."""
        if not self.turns:
            raise ValueError("reward_turn: got a chat without a turn, expected an answer to reward. Call ask() first.")
        last = self.turns[-1]
        last.reward = reward + (last.reward or 0.0)

    def training_texts(self, reward: float | None = None, *, by_turn: bool = False) -> list[TrainingText]:
        """Return the samples of this chat.

        One sample for each sequence, with a mask over its turns; or, `by_turn` or with rewards of turns, one for each
        turn. In either form every sampled token is trained once. With rewards of turns, `reward` is added to the
        last turn's, and the samples are marked for `finetune.rl.gamma`. Without either, the texts have no reward yet
        and it has to be set.
        """
        turns = self.turns
        if any(turn.reward is not None for turn in turns):
            texts = [make_training_text(self._llm, turn.call) for turn in turns]
            rewards = [turn.reward or 0.0 for turn in turns]
            rewards[-1] += reward or 0.0
            for text, own in zip(texts, rewards, strict=True):
                text.reward = own
                text.metadata[STEP_REWARD] = True
            return texts
        if by_turn:
            texts = [make_training_text(self._llm, turn.call) for turn in turns]
        else:
            texts = [transcript.training_text() for transcript in self.transcripts]
        for text in texts:
            text.reward = reward
        return texts

    def _grow(self) -> tuple[list[Message], tuple[Transcript, str, list[int]] | None]:
        """Return the messages before the new ones, and the last sequence with text and ids of the next prompt.

        The second is None if a new sequence has to start. The template sees answers as they were sampled; where it
        cannot take them, as OpenAI's format has them.
        """
        if not self.transcripts:
            return self._past, None
        transcript = self.transcripts[-1]
        call = transcript.turns[-1].call
        renderer = self._llm.renderer
        more = continuation(renderer, self._past, call, self._new, self.tools, transcript.text)
        if more is None:
            return [*self._past, for_template(self.messages[len(self.messages) - len(self._new) - 1])], None
        past = [*self._past, {"role": "assistant", "content": sampled_text(renderer, call)}]
        return past, (transcript, transcript.text + more.text, [*transcript.ids, *more.ids])

    def _render(self, past: list[Message]) -> tuple[list[Message], str, list[int]]:
        """Return the messages before the new ones, and text and ids of the whole chat."""
        try:
            return past, *self._llm.renderer.render([*past, *self._new], self.tools)
        except RolloutError:
            # A template that wants calls before their results: give it OpenAI's form of every answer.
            past = [for_template(message) for message in self.messages[: len(self.messages) - len(self._new)]]
            return past, *self._llm.renderer.render([*past, *self._new], self.tools)
