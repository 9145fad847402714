"""OpenAI's responses format, both ways, in terms of chat messages. Pure; called by the proxy."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from pipelinerl.agents.openai_format import BadRequestError
from pipelinerl.llm import LLMCall
from pipelinerl.llm.chat_messages import Message

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# What models of other makers put between their items; nothing of it is in our prompts.
_IGNORED_ITEMS = ("reasoning",)


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """The parts of a request that are followed. `new` are its own messages, after those of `previous`.

    Instructions hold for one request: they stand before everything and are not part of what a next one continues.
    """

    instructions: list[Message]
    new: list[Message]
    previous: str | None
    tools: list[dict[str, Any]] | None
    parameters: dict[str, Any]
    stream: bool


def read_responses_request(body: Any) -> ResponsesRequest:
    """Check a request.

    Raises:
        BadRequestError: it has no input, or an item, tool or field is of a kind that is not served.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body is not a JSON object")
    instructions, given, previous = body.get("instructions"), body.get("input"), body.get("previous_response_id")
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequestError("instructions: a text is needed")
    if previous is not None and not isinstance(previous, str):
        raise BadRequestError("previous_response_id: a text is needed")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise BadRequestError("input: a text or a list with at least one item is needed")
    tools = [_chat_tool(tool) for tool in body.get("tools") or []]
    limit = body.get("max_output_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise BadRequestError("max_output_tokens: a number of at least 1 is needed")
    return ResponsesRequest(
        instructions=[{"role": "system", "content": instructions}] if instructions else [],
        new=_messages(items),
        previous=previous,
        tools=tools if tools and body.get("tool_choice") != "none" else None,
        parameters={} if limit is None else {"max_tokens": limit},
        stream=bool(body.get("stream")),
    )


def _messages(items: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise BadRequestError("input: each item is an object")
        kind = item.get("type", "message")
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise BadRequestError(f"input: got role {item.get('role')!r}, expected one of {', '.join(_ROLES)}")
            messages.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            # Calls belong to the assistant's message before them; an answer of calls alone has none.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind not in _IGNORED_ITEMS:
            raise BadRequestError(f"input: items of type {kind!r} are not served")
    return messages


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadRequestError("tools: functions are the only kind that is served")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None},
    }


def response_object(call: LLMCall, model: str) -> dict[str, Any]:
    """Return the answer to a request."""
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
    """Return an answer as server-sent events, each part of it whole."""
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


def _item_event(what: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
