"""Blocking calls of transports in daemon threads, awaited from an event loop. Used by `link`.

A pool would join its threads when the interpreter exits; a thread that is stuck in NCCL must not keep a process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(name: str, call: Callable[[], Result]) -> Result:
    """Run `call` in a daemon thread. If the awaiting task is cancelled the thread goes on and its result is dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def deliver(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result: Result | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting task
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, result, failure)
        except RuntimeError:
            if not loop.is_closed():
                raise

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
