"""A web application on a port of this machine, behind the token check, while the context is open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from pipelinerl.inference.auth import TokenMiddleware

_START_TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def served(app: Any, token: str, port: int = 0) -> AsyncIterator[str]:
    """Yield its address."""
    behind_token: Any = TokenMiddleware(app, token)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(behind_token, log_level="error", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
