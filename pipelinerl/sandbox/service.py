"""The verifier service and the game service as web applications.

Neither runs a grader or a game itself, so it answers whatever they do. A request waits for a sandboxed process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from pipelinerl.sandbox.pool import GamePool, GraderPool
from pipelinerl.sandbox.protocol import GAMES_PATH, VERIFY_PATH, ActInGame, GradeRequest, OpenGame

MAX_BODY_BYTES = 64 << 20
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


def verifier_app(pool: GraderPool, max_queue: int) -> FastAPI:
    """Return the verifier service.

    Args:
        pool: grades; closed when the application ends.
        max_queue: requests that are graded or wait; one more gets status 503, and the client retries it.
    """
    app = _app(pool)

    @app.get("/stats")
    async def stats() -> Response:
        numbers = {
            "waiting": pool.waiting,
            "processes": pool.num_processes,
            "grading_seconds": round(pool.seconds, 3),
            "outcomes": dict(pool.outcomes),
        }
        return _json(200, numbers)

    @app.post(VERIFY_PATH)
    async def verify(request: Request) -> Response:
        if pool.waiting >= max_queue:
            return _json(503, {"error": f"{pool.waiting} requests are waiting already"})
        wanted = await _read(request, GradeRequest)
        return wanted if isinstance(wanted, Response) else _json(200, await pool.grade(wanted))

    return app


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
    app = _app(pool)

    @app.get("/stats")
    async def stats() -> Response:
        return _json(200, {"games": pool.num_games, "processes": pool.num_processes, "failures": dict(pool.outcomes)})

    @app.post(GAMES_PATH)
    async def open_game(request: Request) -> Response:
        wanted = await _read(request, OpenGame)
        return wanted if isinstance(wanted, Response) else _json(200, await pool.open(wanted))

    @app.post(GAMES_PATH + "/{number}")
    async def act(number: int, request: Request) -> Response:
        wanted = await _read(request, ActInGame)
        return wanted if isinstance(wanted, Response) else _json(200, await pool.act(number, wanted.text))

    @app.delete(GAMES_PATH + "/{number}")
    async def close(number: int) -> Response:
        await pool.close(number)
        return Response(status_code=204)

    return app


def _app(pool: GraderPool | GamePool) -> FastAPI:
    """An application that closes `pool` when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


async def _read(request: Request, kind: type[T]) -> T | Response:
    """Return the message in the body, or the response that refuses it."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return _json(413, {"error": f"more than {MAX_BODY_BYTES} bytes"})
    try:
        return msgspec.json.decode(bytes(body), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _json(400, {"error": str(error)})


def _json(status: int, content: object) -> Response:
    return Response(_encode(content), status_code=status, media_type="application/json")
