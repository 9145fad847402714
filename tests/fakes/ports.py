"""Ports for tests that have to name one before anybody listens on it, or one on which nobody ever does."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

from pipelinerl.world import can_bind

# Below the ports that Linux gives to connections and to whoever asks for port 0: between the choice of a port and its
# use, which can be half a minute, nobody gets one of these by chance.
_CHOSEN = range(10_000, 32_000)
_ATTEMPTS = 200


def free_port() -> int:
    """A port on which nobody listens now, and which the system hands to nobody else."""
    for _ in range(_ATTEMPTS):
        port = random.SystemRandom().choice(_CHOSEN)
        if can_bind(port):
            return port
    raise RuntimeError(f"none of {_ATTEMPTS} ports could be bound")


@contextlib.contextmanager
def refused_port() -> Iterator[int]:
    """A port that refuses connections as long as this is open: it is bound, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
