"""OpenAI's chat-completions format, both ways. Pure; called by the proxy."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from pipelinerl.llm import LLMCall
from pipelinerl.llm.chat_messages import Message

_MAX_STOP_STRINGS = 16


class BadRequestError(Exception):
    """The request cannot be served; the text goes back to the agent with status 400."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The parts of a request that are followed. Temperature and other sampling parameters are those of the run."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    parameters: dict[str, Any]
    stream: bool
    include_usage: bool


def read_request(body: Any) -> ChatRequest:
    """Check a request.

    Raises:
        BadRequestError: it has no messages, asks for several choices, or a field is of the wrong kind.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body is not a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages: a list with at least one message is needed")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError("messages: each one is an object with a role")
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise BadRequestError("tools: a list of objects is needed")
    if body.get("n") not in (None, 1):
        raise BadRequestError("n: one choice is made for each request")
    options = body.get("stream_options")
    return ChatRequest(
        messages=messages,
        tools=tools if tools and body.get("tool_choice") != "none" else None,
        parameters=_parameters(body),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise BadRequestError("max_tokens: a number of at least 1 is needed")
        parameters["max_tokens"] = limit
    stop = body.get("stop")
    if stop:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
            raise BadRequestError("stop: a text or a list of texts is needed")
        if len(stops) > _MAX_STOP_STRINGS:
            raise BadRequestError(f"stop: at most {_MAX_STOP_STRINGS} texts")
        parameters["stop"] = stops
    return parameters


def completion(call: LLMCall, model: str) -> dict[str, Any]:
    """Return the answer to a request."""
    message: Message = {"role": "assistant", "content": call.output.content}
    if call.output.tool_calls:
        message["tool_calls"] = call.output.tool_calls
        message["content"] = call.output.content or None
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish_reason(call), "logprobs": None}],
        "usage": _usage(call),
    }


def chunks(call: LLMCall, model: str, include_usage: bool) -> list[bytes]:
    """Return the answer as server-sent events: the whole message, its end, and the mark behind the last one."""
    whole = completion(call, model)
    message = whole["choices"][0]["message"]
    delta = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **each} for index, each in enumerate(delta["tool_calls"])]
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    events: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(call)}]},
    ]
    if include_usage:
        events.append({**head, "choices": [], "usage": whole["usage"]})
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


def error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _finish_reason(call: LLMCall) -> str:
    if call.output.tool_calls:
        return "tool_calls"
    return "stop" if call.finish_reason == "stop" else "length"


def _usage(call: LLMCall) -> dict[str, int]:
    prompt, output = call.prompt_length_tokens, call.output_length_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
