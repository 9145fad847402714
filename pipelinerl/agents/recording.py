"""What one black-box agent asked for: its requests, matched to growing conversations.

Made by the proxy for each rollout; waits for the server. A request that repeats a conversation and adds messages
continues its token sequence; any other starts a new one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from pipelinerl.llm import LLMCall, TrainableLLM
from pipelinerl.llm.chat_messages import Message, identity
from pipelinerl.llm.trainable import Chat
from pipelinerl.rollouts import TrainingText


class Recording:
    """All conversations of one rollout.

    Args:
        llm: the rollout's server.
        session: for requests to it.
        key: the secret by which the agent's requests are known.
    """

    def __init__(self, llm: TrainableLLM, session: aiohttp.ClientSession, key: str) -> None:
        self.key = key
        self.model_name = llm.model_name
        self.failure: Exception | None = None
        # Of the responses endpoint: what a request that names an earlier answer continues.
        self.responses: dict[str, list[Message]] = {}
        self._llm = llm
        self._session = session
        self._chats: list[Chat] = []
        # Conversations that are being answered, or whose last question never was: nothing continues these.
        self._closed: set[int] = set()

    @property
    def num_calls(self) -> int:
        return sum(len(chat.turns) for chat in self._chats)

    async def answer(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, parameters: dict[str, Any]
    ) -> LLMCall:
        """Answer one request.

        Args:
            messages: the whole chat, in OpenAI's format.
            tools: as the agent gave them.
            parameters: `max_tokens` (no more than the run allows) and `stop`.

        Raises:
            RolloutError: as for `Chat.ask`; the latest is kept in `failure`.
        """
        chat, known = self._find(messages, tools)
        new = list(messages[known:])
        self._closed.add(id(chat))
        try:
            call = await chat.ask(*new, parameters=self._bounded(parameters))
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        self._closed.discard(id(chat))
        return call

    def training_texts(self, reward: float) -> list[TrainingText]:
        """Return the samples of all conversations, each with the reward of the rollout."""
        return [text for chat in self._chats if chat.turns for text in chat.training_texts(reward)]

    def _find(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[Chat, int]:
        """Return the longest conversation that `messages` continues and how many of them it has, or a new one."""
        wanted = [identity(message) for message in messages]
        best: Chat | None = None
        for chat in self._chats:
            length = len(chat.messages)
            free = id(chat) not in self._closed and _same_tools(chat.tools, tools)
            if not free or length >= len(wanted) or (best is not None and length <= len(best.messages)):
                continue
            if [identity(message) for message in chat.messages] == wanted[:length]:
                best = chat
        if best is not None:
            return best, len(best.messages)
        fresh = Chat(self._llm, self._session, tools)
        self._chats.append(fresh)
        return fresh, 0

    def _bounded(self, parameters: dict[str, Any]) -> dict[str, Any]:
        bounded = dict(parameters)
        limit = self._llm.parameters.get("max_tokens")
        if "max_tokens" in bounded and limit is not None:
            bounded["max_tokens"] = min(int(limit), bounded["max_tokens"])
        if "stop" in bounded:
            bounded["stop"] = list(dict.fromkeys([*self._llm.parameters.get("stop", []), *bounded["stop"]]))
            bounded["detokenize"] = True
        return bounded


def _same_tools(first: list[dict[str, Any]] | None, second: list[dict[str, Any]] | None) -> bool:
    return json.dumps(first or [], sort_keys=True, default=str) == json.dumps(second or [], sort_keys=True, default=str)
