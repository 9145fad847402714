"""One connection between the launchers of two nodes, watched from both ends. Used by `leader` and `follower`.

A thread waits for the peer's messages, at most `timeout_s` for each; another sends a beat every `interval_s`. A peer
that ends without a word, or falls silent (its node lost power), counts as failed. The reading thread owns the
connection and alone closes it: a second close could hit a descriptor that somebody else has got meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from pipelinerl.errors import EXIT_RUN_FAILED
from pipelinerl.run.node_messages import MAX_BYTES, Beat, Ended, Message, Saved, Stopping, decode, encode

logger = logging.getLogger(__name__)
#: How long a peer may take to read the end.
LAST_WORD_S = 5.0


def send(connection: Connection, message: Message) -> bool:
    """Whether the message went out; a peer that is gone is noticed by whoever reads from it."""
    try:
        connection.send_bytes(encode(message))
    except (OSError, ValueError):
        return False
    return True


def receive(connection: Connection, timeout_s: float) -> Message | None:
    """The next message; None if none came in time.

    Raises:
        EOFError or OSError: the peer is gone. msgspec.MsgspecError: it talks nonsense.
    """
    if not connection.poll(timeout_s):
        return None
    return decode(connection.recv_bytes(MAX_BYTES))


def is_gone(connection: Connection) -> bool:
    """Whether the peer has closed the connection, or its machine has. Takes nothing of what it said."""
    with socket.socket(fileno=os.dup(connection.fileno())) as double:
        try:
            return not double.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class NodeLink:
    """The authenticated connection to `peer` (a name for messages).

    `on_end` is called once, from a thread; before it, from the same thread, `on_stop` for what is said on the way.
    """

    def __init__(
        self,
        connection: Connection,
        peer: str,
        on_end: Callable[[Ended], object],
        interval_s: float,
        timeout_s: float,
        on_stop: Callable[[Stopping | Saved], object] = lambda message: None,
    ) -> None:
        self._connection = connection
        self._peer = peer
        self._on_end = on_end
        self._on_stop = on_stop
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"link to {peer}", daemon=True) for target in (self._read, self._beat)
        ]

    def start(self) -> NodeLink:
        for thread in self._threads:
            thread.start()
        return self

    def end(self, ended: Ended) -> None:
        """Tell the peer how it went and close the connection. May be called twice, and after the peer's end."""
        self.tell_end(ended)
        self.close(time.monotonic() + LAST_WORD_S)

    def tell(self, message: Stopping | Saved) -> None:
        """Say how far the end is, if it has not come on either side yet."""
        if not self._closing.is_set():
            self._send(message)

    def tell_end(self, ended: Ended) -> None:
        """Tell the peer how it went, if the run has not ended on either side yet."""
        if not self._closing.is_set():
            self._closing.set()
            self._send(ended)

    def close(self, deadline: float) -> None:
        """Wait until the peer has read the end, at most to `deadline` (monotonic clock), and close the connection."""
        reader = self._threads[0]
        # The peer closes when it has read that. Closing first, with a beat of the peer unread, could lose it.
        reader.join(max(0.0, deadline - time.monotonic()))
        if reader.is_alive():
            self._shut_down()
            reader.join()

    def _send(self, message: Message) -> None:
        with self._lock:
            send(self._connection, message)

    def _shut_down(self) -> None:
        """Wake the reading thread with an end of file."""
        with self._lock:
            if self._connection.closed:
                return
            with socket.socket(fileno=os.dup(self._connection.fileno())) as double, contextlib.suppress(OSError):
                double.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._send(Beat())

    def _read(self) -> None:
        ended = self._wait_for_end()
        if not self._closing.is_set():
            self._closing.set()
            self._on_end(ended)
        with self._lock:
            self._connection.close()

    def _wait_for_end(self) -> Ended:
        while True:
            try:
                message = receive(self._connection, self._timeout_s)
            except (EOFError, OSError):
                return Ended("failed", f"{self._peer} is gone: its launcher ended without a word", EXIT_RUN_FAILED)
            except msgspec.MsgspecError as error:
                return Ended("failed", f"{self._peer} sent what is no message: {error}", EXIT_RUN_FAILED)
            if message is None:
                text = f"{self._peer} sent no sign of life for {self._timeout_s:.0f} s"
                return Ended("failed", text, EXIT_RUN_FAILED)
            if isinstance(message, Ended):
                return message
            if isinstance(message, (Stopping, Saved)) and not self._closing.is_set():
                self._on_stop(message)
