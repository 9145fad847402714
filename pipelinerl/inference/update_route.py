"""A whole weight update in one call: `POST /pipelinerl/update` pauses, receives, loads and resumes.

`ServerMiddleware` puts `UpdateRoute` inside the token check. The trainer sends the weights meanwhile. One
update at a time; one that failed leaves the server paused, and one that is late never resumes it: half-loaded weights
must not sample, and a call that its caller gave up still runs here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.inference.asgi import answer_json, read_body
from pipelinerl.inference.auth import App, Receive, Scope, Send

UPDATE_PATH = "/pipelinerl/update"
#: Method of `worker_extension` that receives and loads, with the seconds of its parts.
WORKER_METHOD = "pipelinerl_whole_update"


@dataclass
class UpdateCall:
    """One call: what it asks for, how far it came, and the seconds of its phases."""

    engine: Any
    update_info: dict[str, Any]
    version: str
    clear_cache: bool
    wakes: bool
    phase: str = "pause"
    seconds: dict[str, float] = field(default_factory=dict)

    async def run(self, deadline: float) -> None:
        """Pause, receive, load, resume. Raises what went wrong; `phase` says where."""
        engine = self.engine
        with self._timed("pause"):
            if self.wakes:
                # Before the pause: a server that is fully awake after this call has resumed.
                await engine.wake_up(["weights"])
            if self.clear_cache:
                await engine.renderer.clear_mm_cache_async()
            # The engine's own pause sleeps 20 ms afterwards; the label of a token is set in the engine, so that
            # outputs which are still on their way need no waiting for.
            await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=self.clear_cache)
        self.phase = "transfer"
        parts = await engine.collective_rpc(WORKER_METHOD, kwargs={"update_info": self.update_info})
        for phase in parts[0]:
            self.seconds[phase] = max(part[phase] for part in parts)
        with self._timed("load"):
            await engine.update_weight_version(self.version)
        with self._timed("resume"):
            if time.monotonic() > deadline:
                raise TimeoutError("the weights are loaded, but the caller waits no more")
            if self.wakes:
                await engine.wake_up(["kv_cache"])
            await engine.resume_generation()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self.phase = phase
        start = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start


class UpdateRoute:
    """Answers the one path, and hands everything else on."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != UPDATE_PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = json.loads(await read_body(receive))
            limit_s = float(body["limit_s"])
            call = UpdateCall(
                engine=scope["app"].state.engine_client,
                update_info=dict(body["update_info"]),
                version=str(body["weight_version"]),
                clear_cache=bool(body["clear_cache"]),
                wakes=bool(body.get("wakes", False)),
            )
        except (ConnectionError, ValueError, KeyError, TypeError) as error:
            await answer_json(send, 400, {"error": {"message": f"update: {type(error).__name__}: {error}"}})
            return
        deadline = time.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s), self._one_at_a_time:
                await call.run(deadline)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the answer
            why = str(error) or f"no end after {limit_s:g} s; the server's log may say why"
            message = f"{call.phase}: {type(error).__name__}: {why}"
            await answer_json(send, 500, {"error": {"message": message, "phase": call.phase}})
            return
        await answer_json(send, 200, {"seconds": call.seconds})
