"""What a server has around vLLM's routes: no route of ours lies outside of the token check."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.inference.auth import TOKEN_VARIABLE
from pipelinerl.inference.fast_output import ServerMiddleware
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE

TOKEN = "a-token-of-sixteen-or-more"


async def status_of(path: str, token: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Status of a POST; 418 is the answer of vLLM's own routes."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"authorization", f"Bearer {token}".encode()), (b"accept", MEDIA_TYPE.encode())]
    scope = {"type": "http", "path": path, "method": "POST", "headers": headers}
    await ServerMiddleware(app)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize("path", [GENERATE_PATH, "/pause"])
async def test_nothing_is_reached_without_the_token(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await status_of(path, "another-token-of-some-length", monkeypatch) == 401


async def test_with_it_our_routes_answer_and_others_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await status_of("/pause", TOKEN, monkeypatch) == 418
