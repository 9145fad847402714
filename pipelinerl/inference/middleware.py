"""What a server has around vLLM's own routes, as the one thing that its command line names.

vLLM loads `ServerMiddleware` through `--middleware`. The option may be repeated, but vLLM then warns of duplicates at
every start.
"""

from __future__ import annotations

from pipelinerl.inference.auth import App, Receive, Scope, Send, TokenMiddleware
from pipelinerl.inference.lean_route import LeanRoute


class ServerMiddleware:
    """The token check around our routes around vLLM's: nothing is reached without the token."""

    def __init__(self, app: App) -> None:
        self._app = TokenMiddleware(LeanRoute(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
