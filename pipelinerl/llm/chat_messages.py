"""Messages in OpenAI's format: how chat templates want them, and when two of them are the same."""

from __future__ import annotations

import json
from typing import Any

from pipelinerl.llm.tool_calls import arguments_of

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

    Lone surrogates, which no tokenizer accepts, become question marks.
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
    """Return a text that is equal for two messages with the same meaning, however their client wrote them."""
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
