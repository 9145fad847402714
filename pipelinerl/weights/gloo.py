"""Weight transfer over gloo, for servers on CPUs.

Every operation has the group's timeout; when one end closes its group the other end's operation fails at once.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from pipelinerl.weights.transport import (
    TRAINER_RANK,
    GroupReceiver,
    GroupSender,
    SenderOptions,
    find_store,
    local_address,
)

_CPU = torch.device("cpu")


def open_sender(options: SenderOptions) -> GroupSender:
    def lead(store: TCPStore, world_size: int) -> GlooGroup:
        return GlooGroup(store, TRAINER_RANK, world_size, options.timeout_s, options.address)

    return GroupSender(options, lead, _CPU)


def open_receiver(details: dict[str, Any], worker: int, device: torch.device) -> GroupReceiver:
    own_address = local_address(details["master_address"], details["master_port"])
    group = GlooGroup(find_store(details), 1 + worker, details["world_size"], details["timeout_s"], own_address)
    return GroupReceiver(group, _CPU)


class GlooGroup:
    """A group of the trainer and the workers of one server.

    Raises:
        RuntimeError: the other ranks did not come within `timeout_s`.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int, timeout_s: float, address: str) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        # Kept because the store has to outlive the group.
        self._store = store
        self._lock = threading.Lock()
        self._busy = False
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        # By default gloo looks up its own host name, which fails on machines without name resolution.
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, options)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast `buffer` (contiguous, on the CPU) from the trainer to the workers, in place; blocks.

        Raises:
            RuntimeError: a peer went away, the timeout passed, or this group was closed.
        """
        with self._lock:
            group = self._group
            if group is None or self._busy:
                raise RuntimeError("gloo group: it was closed, or another broadcast is under way")
            self._busy = True
        try:
            group.broadcast(buffer, TRAINER_RANK, self._timeout).wait(self._timeout)
        finally:
            with self._lock:
                self._busy = False
                is_left = self._group is None
            if is_left:
                group.abort()

    def close(self) -> None:
        """Leave the group; a peer that waits for us fails at once. A broadcast of ours in another thread ends first, at
        the latest with its timeout: aborting it from here would stop every thread of the process."""
        with self._lock:
            group, self._group = self._group, None
            if self._busy:
                return
        if group is not None:
            group.abort()
