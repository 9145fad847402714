"""One gloo group of a trainer and the workers of one server. Used by both ends; no vllm.

The trainer serves the `TCPStore` of the rendezvous. Every operation has the group's time-out; when either end closes
its group the other end's operation fails at once.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

TRAINER_RANK = 0


class GlooGroup:
    """A group of `world_size` ranks; rank 0, the trainer, is the only sender."""

    def __init__(self, group: ProcessGroupGloo, store: TCPStore, timeout_s: float) -> None:
        self._group: ProcessGroupGloo | None = group
        # Kept because the store has to outlive the group.
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._busy = False

    @classmethod
    def join(cls, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> GlooGroup:
        """Join as a worker. Raises RuntimeError (DistStoreError) if the others do not come within `timeout_s`."""
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
        return cls(_process_group(store, rank, world_size, timeout, local_address(address, port)), store, timeout_s)

    @classmethod
    def lead(cls, store: TCPStore, address: str, world_size: int, timeout_s: float) -> GlooGroup:
        """Join as the trainer, over a store that it serves at `address`."""
        timeout = timedelta(seconds=timeout_s)
        return cls(_process_group(store, TRAINER_RANK, world_size, timeout, address), store, timeout_s)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast `buffer` (contiguous, on the CPU) from the trainer to the workers, in place; blocks.

        Raises:
            RuntimeError: a peer went away, the time-out passed, or this group was closed.
        """
        with self._lock:
            group = self._group
            if group is None or self._busy:
                raise RuntimeError("gloo group: it was closed, or another broadcast is under way")
            self._busy = True
        try:
            group.broadcast(buffer, TRAINER_RANK, self._timeout).wait(self._timeout)  # type: ignore[attr-defined]
        finally:
            with self._lock:
                self._busy = False
                is_left = self._group is None
            if is_left:
                group.abort()

    def close(self) -> None:
        """Leave the group; a peer that waits for us fails at once. A broadcast of ours that another thread is in ends
        first, at the latest with its time-out: aborting it from here would stop every thread of the process."""
        with self._lock:
            group, self._group = self._group, None
            if self._busy:
                return
        if group is not None:
            group.abort()


def _process_group(store: TCPStore, rank: int, world_size: int, timeout: timedelta, address: str) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # By default gloo looks its own host name up, which fails on machines without name resolution.
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, options)


def local_address(peer: str, port: int) -> str:
    """This machine's address on the route to `peer` (connecting a datagram socket sends nothing)."""
    family, kind, protocol, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
