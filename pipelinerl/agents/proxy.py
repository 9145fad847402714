"""An OpenAI endpoint on loopback in front of the servers, which records what it answers. One in each worker process.

Started by the first black-box rollout of the process. Waits for requests of agents and, in them, for the servers. An
agent is known by its API key, which is a new secret for every rollout.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from pipelinerl.agents.openai_format import BadRequestError, chunks, completion, error, read_request
from pipelinerl.agents.recording import Recording
from pipelinerl.agents.responses_format import read_responses_request, response_events, response_object
from pipelinerl.errors import EndRunError, RetryableRolloutError, RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.chat_messages import assistant_message

_MAX_BODY_BYTES = 64 * 2**20


class Proxy:
    """`start` first; `base_url` is then what an OpenAI client takes."""

    def __init__(self) -> None:
        self.base_url = ""
        self._recordings: dict[str, Recording] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_get("/v1/models", self._models)
        # An agent that gives up (cancelled rollout) must not go on sampling.
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

    def _recording_of(self, request: web.Request) -> Recording | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._recordings.get(key) if scheme.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.Response:
        recording = self._recording_of(request)
        if recording is None:
            return _unknown_key()
        return web.json_response({"object": "list", "data": [{"id": recording.model_name, "object": "model"}]})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        recording = self._recording_of(request)
        if recording is None:
            return _unknown_key()
        try:
            asked = read_request(await request.json())
            call = await recording.answer(asked.messages, asked.tools, asked.parameters)
        except (BadRequestError, ValueError) as problem:
            return web.json_response(error(str(problem), "invalid_request_error"), status=400)
        except (RolloutError, EndRunError) as problem:
            return _failed(problem)
        if not asked.stream:
            return web.json_response(completion(call, recording.model_name))
        return await _stream(request, chunks(call, recording.model_name, asked.include_usage))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        recording = self._recording_of(request)
        if recording is None:
            return _unknown_key()
        try:
            asked = read_responses_request(await request.json())
            if asked.previous is not None and asked.previous not in recording.responses:
                raise BadRequestError(f"previous_response_id: {asked.previous!r} is no response of this rollout")
            messages = [*recording.responses.get(asked.previous or "", []), *asked.new]
            call = await recording.answer([*asked.instructions, *messages], asked.tools, asked.parameters)
        except (BadRequestError, ValueError) as problem:
            return web.json_response(error(str(problem), "invalid_request_error"), status=400)
        except (RolloutError, EndRunError) as problem:
            return _failed(problem)
        answer = response_object(call, recording.model_name)
        said = assistant_message(call.output.content or "", call.output.tool_calls)
        recording.responses[answer["id"]] = [*messages, said]
        return await _stream(request, response_events(answer)) if asked.stream else web.json_response(answer)


async def _stream(request: web.Request, events: list[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response


def _failed(problem: Exception) -> web.Response:
    """A full context is the agent's to deal with; anything else fails its rollout, whatever it makes of the answer."""
    if isinstance(problem, RolloutError) and problem.reason == "context_overflow":
        # In the words by which agents know it.
        text = f"This model's maximum context length is exceeded. {problem}"
        body: dict[str, Any] = error(text, "invalid_request_error", "context_length_exceeded")
        return web.json_response(body, status=400)
    if isinstance(problem, RetryableRolloutError):
        return web.json_response(error(str(problem), "server_error"), status=503, headers={"x-should-retry": "false"})
    return web.json_response(error(str(problem), "invalid_request_error"), status=400)


def _unknown_key() -> web.Response:
    return web.json_response(error("unknown API key", "invalid_request_error", "invalid_api_key"), status=401)
