"""Black-box agents: programs that talk to an OpenAI endpoint and know nothing of training.

`generate_rollout = black_box(rollout)` is a rollout function. It gives the agent the address of a proxy on loopback
(`Proxy`), which answers from the rollout's server and records every conversation (`Recording`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from pipelinerl.agents.openai_format import (
    BadRequestError,
    completion,
    completion_events,
    error_body,
    read_chat_request,
    read_responses_request,
    response_events,
    response_object,
)
from pipelinerl.agents.user_threads import start_thread
from pipelinerl.errors import DomainError, EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm import LLMCall, TrainableLLM
from pipelinerl.llm.chat import Chat, Message, assistant_message, identity
from pipelinerl.llm.sample_builder import checked_reward
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

_SHAPE = "rollout(base_url, api_key, problem) -> reward, or (reward, dict of metrics)"
_MAX_BODY_BYTES = 64 * 2**20

Agent = Callable[[str, str, dict[str, Any]], Any]


def black_box(agent: Agent) -> BlackBox:
    """Return a rollout function for `agent`: `rollout(base_url, api_key, problem) -> reward`, async or not.

    The agent passes `base_url` and `api_key` to its OpenAI client. It may send any number of requests, also concurrent
    ones, and may return `(reward, metrics)`, where `metrics` is a dict of numbers.
    """
    return BlackBox(agent)


class BlackBox:
    """The rollout function. It owns the proxy of its event loop, started at the first rollout."""

    def __init__(self, agent: Agent) -> None:
        functools.update_wrapper(self, agent)
        # Signature checks are about this object, not about the agent.
        self.__signature__ = inspect.signature(self.__call__)  # type: ignore[operator]
        self._agent = agent
        self._proxy: Proxy | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()

    async def __call__(
        self, cfg: Any, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
    ) -> RolloutResult:
        """Run the agent once and return the samples of all its requests.

        Raises:
            RolloutError: a request could not be served, the agent sent none (`no_request`), or its reward is not a
                number (`bad_reward`). The agent's own exceptions pass through.
        """
        started = time.monotonic()
        async with self._starting:
            if self._proxy is None or self._loop is not asyncio.get_running_loop():  # `check-domain` has a new one
                proxy = Proxy()
                await proxy.start()
                self._proxy, self._loop = proxy, asyncio.get_running_loop()
        with self._proxy.recording(llm, session) as recording:
            try:
                answer = await self._run(self._proxy.base_url, recording.key, problem)
            except Exception as error:
                # The failed request, if any, is the cause of whatever the agent raised.
                raise (recording.failure or error) from error
        if isinstance(recording.failure, EndRunError | RetryableRolloutError):
            raise recording.failure
        reward, metrics = _read_answer(answer)
        if not recording.num_calls:
            raise recording.failure or RolloutError("no_request", "the agent ended without a request to base_url")
        success = bool(metrics.pop("success", reward > 0))
        return RolloutResult(
            training_texts=recording.training_texts(reward),
            metrics=BaseMetrics.model_validate(
                {"requests": recording.num_calls, **metrics, "reward": reward, "success": success}
            ),
            latency=time.monotonic() - started,
            dataset_name=problem.get("dataset"),
        )

    async def close(self) -> None:
        """Stop the proxy; the end of the process does the same."""
        if self._proxy is not None:
            await self._proxy.close()
            self._proxy = None

    async def _run(self, base_url: str, key: str, problem: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(base_url, key, problem)
        answer = await asyncio.wrap_future(start_thread(functools.partial(self._agent, base_url, key, problem)))
        return await answer if inspect.isawaitable(answer) else answer


def _read_answer(answer: Any) -> tuple[float, dict[str, Any]]:
    metrics: Any = {}
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], dict):
            raise DomainError(f"actor.rollout_policy: the agent returned {str(answer)[:80]!r}, expected {_SHAPE}.")
        answer, metrics = answer
    if answer is None:
        raise DomainError(f"actor.rollout_policy: the agent returned None, expected {_SHAPE}. Is a `return` missing?")
    return checked_reward(answer), dict(metrics)


class Recording:
    """All conversations of one rollout. A request that repeats a conversation and adds messages continues its token
    sequence; any other starts a new one.

    Args:
        llm: the rollout's server.
        session: for requests to it.
        key: the secret that identifies the agent's requests.
    """

    def __init__(self, llm: TrainableLLM, session: aiohttp.ClientSession, key: str) -> None:
        self.key = key
        self.model_name = llm.model_name
        self.failure: Exception | None = None  # of the latest request
        # Responses endpoint: the messages that a request with `previous_response_id` continues.
        self.responses: dict[str, list[Message]] = {}
        self._llm = llm
        self._session = session
        self._chats: list[Chat] = []
        # Conversations that are being answered, or whose last question failed: nothing continues these.
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
            parameters: `max_tokens` (capped at the run's) and `stop`.

        Raises:
            RolloutError: as for `Chat.ask`; kept in `failure`.
        """
        chat, known = self._find(messages, tools)
        self._closed.add(id(chat))
        try:
            call = await chat.ask(*messages[known:], parameters=self._bounded(parameters))
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
        """Return the longest conversation that `messages` continues and its length, or a new one and 0."""
        wanted = [identity(message) for message in messages]
        for chat in sorted(self._chats, key=lambda chat: len(chat.messages), reverse=True):
            length = len(chat.messages)
            if id(chat) in self._closed or length >= len(wanted) or not _same_tools(chat.tools, tools):
                continue
            if [identity(message) for message in chat.messages] == wanted[:length]:
                return chat, length
        fresh = self._llm.chat(self._session, tools)
        self._chats.append(fresh)
        return fresh, 0

    def _bounded(self, parameters: dict[str, Any]) -> dict[str, Any]:
        bounded = dict(parameters)
        limit = self._llm.parameters.get("max_tokens")
        if "max_tokens" in bounded and limit is not None:
            bounded["max_tokens"] = min(int(limit), bounded["max_tokens"])
        if "stop" in bounded:
            bounded["stop"] = list(dict.fromkeys([*self._llm.parameters.get("stop", []), *bounded["stop"]]))
        return bounded


def _same_tools(first: list[dict[str, Any]] | None, second: list[dict[str, Any]] | None) -> bool:
    return json.dumps(first or [], sort_keys=True, default=str) == json.dumps(second or [], sort_keys=True, default=str)


class Proxy:
    """OpenAI endpoint on loopback. Each rollout's agent has its own API key, a new secret."""

    def __init__(self) -> None:
        self.base_url = ""  # what an OpenAI client needs; known after `start`
        self._recordings: dict[str, Recording] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._route(_chat_completions))
        app.router.add_post("/v1/responses", self._route(_responses))
        app.router.add_get("/v1/models", self._route(_models))
        # When an agent gives up (cancelled rollout), sampling stops.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def recording(self, llm: TrainableLLM, session: aiohttp.ClientSession) -> Iterator[Recording]:
        """Answer requests with the recording's key while the context is open."""
        recording = Recording(llm, session, f"sk-{secrets.token_urlsafe(24)}")
        self._recordings[recording.key] = recording
        try:
            yield recording
        finally:
            del self._recordings[recording.key]

    def _route(self, answer: Callable[[Recording, web.Request], Any]) -> Callable[[web.Request], Any]:
        """Return a handler that finds the rollout of a request by its key and turns errors into OpenAI's."""

        async def handle(request: web.Request) -> web.StreamResponse:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            recording = self._recordings.get(key) if scheme.lower() == "bearer" else None
            if recording is None:
                return _error(401, "unknown API key", "invalid_request_error", "invalid_api_key")
            try:
                response: web.StreamResponse = await answer(recording, request)
            except (BadRequestError, ValueError) as error:
                return _error(400, str(error), "invalid_request_error")
            except RetryableRolloutError as error:
                response = _error(503, str(error), "server_error")
                response.headers["x-should-retry"] = "false"  # it was retried already
            except (RolloutError, EndRunError) as error:
                if isinstance(error, RolloutError) and error.reason == "context_overflow":
                    # The agent may deal with this one: it gets the words and the code that OpenAI uses.
                    text = f"This model's maximum context length is exceeded. {error}"
                    return _error(400, text, "invalid_request_error", "context_length_exceeded")
                return _error(400, str(error), "invalid_request_error")
            return response

        return handle


async def _models(recording: Recording, request: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [{"id": recording.model_name, "object": "model"}]})


async def _chat_completions(recording: Recording, request: web.Request) -> web.StreamResponse:
    asked = read_chat_request(await request.json())
    call = await recording.answer(asked.messages, asked.tools, asked.parameters)
    if not asked.stream:
        return web.json_response(completion(call, recording.model_name))
    return await _stream(request, completion_events(call, recording.model_name, asked.include_usage))


async def _responses(recording: Recording, request: web.Request) -> web.StreamResponse:
    asked = read_responses_request(await request.json())
    if asked.previous is not None and asked.previous not in recording.responses:
        raise BadRequestError(f"previous_response_id: {asked.previous!r} is not a response of this rollout")
    messages = [*recording.responses.get(asked.previous or "", []), *asked.messages]
    call = await recording.answer([*asked.instructions, *messages], asked.tools, asked.parameters)
    answer = response_object(call, recording.model_name)
    own = assistant_message(call.output.content or "", call.output.tool_calls)
    recording.responses[answer["id"]] = [*messages, own]
    return await _stream(request, response_events(answer)) if asked.stream else web.json_response(answer)


async def _stream(request: web.Request, events: list[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response


def _error(status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    return web.json_response(error_body(message, kind, code), status=status)
