"""The verifier service and the game service as web applications with one route.

Neither runs a grader or a game itself, so it answers whatever they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from pipelinerl.sandbox.pool import GamePool, GraderPool
from pipelinerl.sandbox.protocol import SERVICE_PATH, Failed, GameRequest, GradeRequest, Reply

MAX_BODY_BYTES = 64 << 20
MAX_QUEUE = 8192


def verifier_app(pool: GraderPool, max_queue: int = MAX_QUEUE) -> FastAPI:
    """Return the verifier service.

    Args:
        pool: grades; closed when the application ends.
        max_queue: requests that are graded or wait; one more is refused, and its client retries it.
    """

    async def answer(request: GradeRequest) -> Reply:
        if pool.waiting >= max_queue:
            return Failed("verifier_busy", f"{pool.waiting} requests are waiting already", transient=True)
        return await pool.grade(request)

    return _app(pool, GradeRequest, answer)


def create_app(
    processes: int = 2,
    timeout_s: float = 30.0,
    memory_mib: int = 4096,
    max_games: int = 4096,
    idle_timeout_s: float = 3600.0,
) -> FastAPI:
    """Return the service for text games, to be named by `environment._target_` as `pipelinerl.games.create_app`.

    Args:
        processes: game processes; each plays one move at a time.
        timeout_s: deadline of a move.
        memory_mib: address space of a game process.
        max_games: games at the same time; the rollout of one more is retried later.
        idle_timeout_s: a game without a move for this long is closed.
    """
    pool = GamePool(processes, timeout_s, memory_mib << 20, max_games, idle_timeout_s)
    return _app(pool, GameRequest, pool.answer)


def _app(pool: GraderPool | GamePool, requests: Any, answer: Callable[[Any], Awaitable[Reply]]) -> FastAPI:
    """An application that answers messages of the type `requests` and closes `pool` when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.post(SERVICE_PATH)
    async def ask(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return Response(f"more than {MAX_BODY_BYTES} bytes", 413)
        try:
            message = msgspec.json.decode(bytes(body), type=requests)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Response(str(error), 400)
        return Response(msgspec.json.encode(await answer(message)), media_type="application/json")

    return app
