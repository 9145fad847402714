"""Small parts of ASGI that our routes inside a vLLM server share: read a body, answer, give a body back.

Waits for the caller's bytes.
"""

from __future__ import annotations

import json
from typing import Any

from pipelinerl.inference.auth import Receive, Send


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request.

    Raises:
        ConnectionError: the caller went away first.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the caller went away")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def with_body_again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for the application behind, which has not seen the body yet."""
    bodies = [body]

    async def receive_again() -> Any:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return receive_again


async def answer(send: Send, status: int, body: bytes, media_type: str) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a JSON object."""
    await answer(send, status, json.dumps(content).encode(), "application/json")
