"""Plain functions of the user, which may block, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def start_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run `function` in a daemon thread and return its future.

    An executor is not used because the exit of the process would wait for a function that never returns. StopIteration
    becomes a RuntimeError, as in a coroutine: asyncio's futures cannot hold it and would never finish.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function()
        except StopIteration as error:
            stopped = RuntimeError("the function raised StopIteration")
            stopped.__cause__ = error
            future.set_exception(stopped)
        except BaseException as error:  # noqa: BLE001 - passed on to whoever awaits the future
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return future
