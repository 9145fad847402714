"""The service for text games as a web application: `create_app` is what `environment._target_` names for it.

Served by `environment_main`, which puts the token check around it. Games run in processes of their own, so the
service answers whatever they do. A request waits for its game's process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from fastapi import FastAPI, Request, Response

from pipelinerl.sandbox.game_messages import GAMES_PATH, ActInGame, OpenGame
from pipelinerl.sandbox.game_pool import GamePool

MAX_BODY_BYTES = 64 << 20
_decode_open = msgspec.json.Decoder(OpenGame).decode
_decode_act = msgspec.json.Decoder(ActInGame).decode
_encode = msgspec.json.Encoder().encode


def create_app(
    processes: int = 2,
    timeout_s: float = 30.0,
    memory_mib: int = 4096,
    max_games: int = 4096,
    idle_timeout_s: float = 3600.0,
) -> FastAPI:
    """Return the application.

    Args:
        processes: game processes; each plays one move at a time.
        timeout_s: deadline of a move.
        memory_mib: address space of a game process.
        max_games: games at the same time; the rollout of one more is tried again later.
        idle_timeout_s: a game without a move for so long is closed.
    """
    pool = GamePool(processes, timeout_s, memory_mib << 20, max_games, idle_timeout_s)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/stats")
    async def stats() -> Response:
        return _json(200, {"games": pool.num_games, "processes": pool.num_processes, "failures": dict(pool.outcomes)})

    @app.post(GAMES_PATH)
    async def open_game(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _json(413, {"error": f"more than {MAX_BODY_BYTES} bytes"})
        try:
            wanted = _decode_open(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json(400, {"error": str(error)})
        return _json(200, await pool.open(wanted))

    @app.post(GAMES_PATH + "/{number}")
    async def act(number: int, request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return _json(413, {"error": f"more than {MAX_BODY_BYTES} bytes"})
        try:
            wanted = _decode_act(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json(400, {"error": str(error)})
        return _json(200, await pool.act(number, wanted.text))

    @app.delete(GAMES_PATH + "/{number}")
    async def close(number: int) -> Response:
        await pool.close(number)
        return Response(status_code=204)

    return app


async def _body(request: Request) -> bytes | None:
    """Return the body, or None if it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _json(status: int, content: object) -> Response:
    return Response(_encode(content), status_code=status, media_type="application/json")
