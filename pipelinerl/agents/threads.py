"""Plain functions of the user in threads, since they may block. Called by the agent rollouts; waits for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def start_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run `function` in a thread of its own and return what its answer will be in.

    The end of the process does not wait for it, as it would for an executor's: a function that never returns would keep
    a check or a worker from ending. StopIteration comes out as RuntimeError, as of a coroutine: asyncio's futures
    cannot hold it and would never be done.
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
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return future
