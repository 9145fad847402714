"""The verifier service as a web application: `/verify` grades, `/health` and `/stats` say how it is.

Served by `verifier_main`, which puts the token check around it. The service itself never runs a grader, so it
answers whatever its grader processes do. `/verify` waits for a grader process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from fastapi import FastAPI, Request, Response

from pipelinerl.sandbox.client import VERIFY_PATH
from pipelinerl.sandbox.grader_pool import GraderPool
from pipelinerl.sandbox.messages import GradeRequest

MAX_BODY_BYTES = 64 << 20
_decode = msgspec.json.Decoder(GradeRequest).decode
_encode = msgspec.json.Encoder().encode


def create_app(pool: GraderPool, max_queue: int) -> FastAPI:
    """Return the application.

    Args:
        pool: grades; closed when the application ends.
        max_queue: requests that are graded or wait; one more is answered 503 and tried again by the client.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        return Response()

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
            return _json(503, {"error": f"{pool.waiting} requests wait already"})
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _json(413, {"error": f"more than {MAX_BODY_BYTES} bytes"})
        try:
            wanted = _decode(bytes(body))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json(400, {"error": str(error)})
        return _json(200, await pool.grade(wanted))

    return app


def _json(status: int, content: object) -> Response:
    return Response(_encode(content), status_code=status, media_type="application/json")
