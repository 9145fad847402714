"""The check that guards every route of a server: a bearer token on every path but `/health`.

`ServerMiddleware` puts it around everything else; the token comes from the environment only. It is plain ASGI, so
that mounted applications and websockets are guarded as well as routes.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "PIPELINERL_SERVER_TOKEN"
OPEN_PATH = "/health"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def read_token(environ: MutableMapping[str, str]) -> str:
    """The control token of this server.

    Raises:
        ValueError: it is missing, or too short to be a secret.
    """
    token = environ.get(TOKEN_VARIABLE, "")
    if len(token) < 16:
        raise ValueError(
            f"{TOKEN_VARIABLE}: got a value of {len(token)} characters, expected a secret of at least 16. "
            "The launcher sets it; for a server of your own: export "
            f"{TOKEN_VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    return token


class TokenMiddleware:
    """Answers 401 (closes a websocket) unless the request carries `Authorization: Bearer <token>`."""

    def __init__(self, app: App, token: str | None = None) -> None:
        self._app = app
        self._expected = f"Bearer {token or read_token(os.environ)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "missing or wrong token"})
        else:
            await _unauthorized(send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _unauthorized(send: Send) -> None:
    body = json.dumps({"error": "missing or wrong token"}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
