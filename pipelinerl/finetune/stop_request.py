"""SIGTERM asks the trainer to save and end (preemption): a flag that the loop looks at between two steps.

Used by the trainer of every rank. A thread waits for the signal's byte in a pipe, because a signal handler may not
take locks, and the wake-up of a reader does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipelinerl.finetune.ranks import Ranks

EXIT_STOPPED = 128 + signal.SIGTERM
_TERM, _QUIT = b"t", b"q"


class StopRequest:
    """Whether this rank was asked to stop, and whether any rank was."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.requested = False

    def agreed(self) -> bool:
        """True on every rank if one of them was asked to stop. All ranks call it at the same place."""
        return self._ranks.max([float(self.requested)])[0] > 0


@contextmanager
def stop_on_sigterm(request: StopRequest, wake: Callable[[], None]) -> Iterator[None]:
    """Set `request` and call `wake` (in a thread) when SIGTERM comes. Outside of the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()

    def listen() -> None:
        if os.read(read_end, 1) == _TERM:
            request.requested = True
            wake()

    thread = threading.Thread(target=listen, name="stop-request", daemon=True)
    thread.start()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(write_end, _TERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        os.write(write_end, _QUIT)
        thread.join()
        os.close(read_end)
        os.close(write_end)
