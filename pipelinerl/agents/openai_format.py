"""OpenAI's chat-completions and responses formats, both ways."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.llm import LLMCall
from pipelinerl.llm.chat import Message, assistant_message

_MAX_STOP_STRINGS = 16
_ROLES = ("user", "assistant", "system", "developer")
_CHAT_ROLES = (*_ROLES, "tool")
# Items that models of other vendors put in between; our prompts have no place for them.
_IGNORED_ITEMS = ("reasoning",)


class BadRequestError(Exception):
    """The request cannot be served; the agent gets the text with status 400."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """What is honored of a request. Temperature and other sampling parameters are those of the run.

    Attributes:
        messages: the whole chat; with `previous`, those after the messages of that response.
        tools: in the chat-completions format.
        parameters: `max_tokens` and `stop`, if given.
        stream: answer as server-sent events.
        include_usage: end a stream with the token counts.
        instructions: come first in this request only; they are not part of what a later one continues.
        previous: id of the response that this request continues.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    parameters: dict[str, Any]
    stream: bool
    include_usage: bool = False
    instructions: list[Message] = field(default_factory=list)
    previous: str | None = None


def read_chat_request(body: Any) -> AgentRequest:
    """Check a chat-completions request.

    Raises:
        BadRequestError: it has no messages, asks for several choices, or a field has the wrong type.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body is not a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages: expected a list with at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError("messages: expected objects with a role")
        if message["role"] not in _CHAT_ROLES:
            raise BadRequestError(_unknown_role("messages", message["role"], _CHAT_ROLES))
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise BadRequestError("tools: expected a list of objects")
    if body.get("n") not in (None, 1):
        raise BadRequestError("n: only one choice per request is supported")
    parameters = _token_limit(body, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens")
    if stop := body.get("stop"):
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
            raise BadRequestError("stop: expected a string or a list of strings")
        if len(stops) > _MAX_STOP_STRINGS:
            raise BadRequestError(f"stop: expected at most {_MAX_STOP_STRINGS} strings")
        parameters["stop"] = stops
    options = body.get("stream_options")
    return AgentRequest(
        messages=messages,
        tools=tools if tools and body.get("tool_choice") != "none" else None,
        parameters=parameters,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def read_responses_request(body: Any) -> AgentRequest:
    """Check a responses request and translate its items into chat messages.

    Raises:
        BadRequestError: it has no input, or an item, tool or field is not supported.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body is not a JSON object")
    instructions, given, previous = body.get("instructions"), body.get("input"), body.get("previous_response_id")
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequestError("instructions: expected a string")
    if previous is not None and not isinstance(previous, str):
        raise BadRequestError("previous_response_id: expected a string")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise BadRequestError("input: expected a string or a list with at least one item")
    tools = [_chat_tool(tool) for tool in body.get("tools") or []]
    return AgentRequest(
        messages=_messages_of_items(items),
        tools=tools if tools and body.get("tool_choice") != "none" else None,
        parameters=_token_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        instructions=[{"role": "system", "content": instructions}] if instructions else [],
        previous=previous,
    )


def completion(call: LLMCall, model: str) -> dict[str, Any]:
    """Return the answer to a chat-completions request."""
    calls = call.output.tool_calls
    message = assistant_message((call.output.content or None) if calls else call.output.content, calls)
    finish_reason = "tool_calls" if calls else "stop" if call.finish_reason == "stop" else "length"
    prompt, output = call.prompt_length_tokens, call.output_length_tokens
    return {
        "id": _new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


def completion_events(call: LLMCall, model: str, include_usage: bool) -> list[bytes]:
    """Return the same answer as server-sent events: the whole message, its end, and the end mark."""
    whole = completion(call, model)
    (choice,) = whole["choices"]
    delta = {key: value for key, value in choice["message"].items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **each} for index, each in enumerate(delta["tool_calls"])]
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    events: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if include_usage:
        events.append({**head, "choices": [], "usage": whole["usage"]})
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


def response_object(call: LLMCall, model: str) -> dict[str, Any]:
    """Return the answer to a responses request."""
    output: list[dict[str, Any]] = []
    is_whole = call.finish_reason == "stop"
    status = "completed" if is_whole else "incomplete"
    if call.output.content or not call.output.tool_calls:
        part = {"type": "output_text", "text": call.output.content or "", "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": status, "content": [part]}
        )
    for tool_call in call.output.tool_calls or []:
        output.append(
            {
                "type": "function_call",
                "id": _new_id("fc"),
                "call_id": tool_call["id"],
                "name": tool_call["function"]["name"],
                "arguments": tool_call["function"]["arguments"],
                "status": "completed",
            }
        )
    prompt, sampled = call.prompt_length_tokens, call.output_length_tokens
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def response_events(answer: dict[str, Any]) -> list[bytes]:
    """Return the same answer as server-sent events, each part in one piece."""
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**answer, "status": "in_progress", "output": [], "usage": None}}
    ]
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            text = {**place, "content_index": 0}
            events += [
                _item_event("added", index, {**item, "content": [], "status": "in_progress"}),
                {"type": "response.content_part.added", **text, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **text, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **text, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **text, "part": part},
            ]
        else:
            arguments = item["arguments"]
            done = {"name": item["name"], "arguments": arguments}
            events += [
                _item_event("added", index, {**item, "arguments": "", "status": "in_progress"}),
                {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
                {"type": "response.function_call_arguments.done", **place, **done},
            ]
        events.append(_item_event("done", index, item))
    events.append({"type": f"response.{answer['status']}", "response": answer})
    return [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()
        for number, event in enumerate(events)
    ]


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error answer."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _token_limit(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the sampling parameter for the output limit in field `name`, if it is given."""
    limit = body.get(name)
    if limit is None:
        return {}
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadRequestError(f"{name}: got {limit!r}, expected an integer of at least 1")
    return {"max_tokens": limit}


def _unknown_role(field_name: str, role: Any, known: tuple[str, ...]) -> str:
    return f"{field_name}: got role {role!r}, expected one of {', '.join(known)}"


def _messages_of_items(items: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise BadRequestError("input: expected objects as items")
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                raise BadRequestError(_unknown_role("input", role, _ROLES))
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            # Calls belong to the assistant message before them; an answer of only calls has none.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind not in _IGNORED_ITEMS:
            raise BadRequestError(f"input: items of type {kind!r} are not supported")
    return messages


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadRequestError("tools: only functions are supported")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None},
    }


def _item_event(what: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
