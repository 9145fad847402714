"""How packed buffers get from the trainer to the workers of one server: the two ends, and gloo, the transport for CPUs.

A transport is opened, used for many updates, and closed; after a failure it is closed and a new one is opened.
"""

from __future__ import annotations

import errno
import importlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from pipelinerl.world.jobs import CPU_TRANSPORT, TRANSPORTS

logger = logging.getLogger(__name__)

#: Transports of other modules, which have `open_sender` and `open_receiver`.
MODULES: Mapping[str, str] = {"nccl": "pipelinerl.weights.nccl", "ipc": "pipelinerl.weights.ipc"}
#: Rank of the trainer, the only sender, in a group; workers follow.
TRAINER_RANK = 0
_CPU = torch.device("cpu")


class Sender(Protocol):
    """The trainer's end of one server's group. All methods block."""

    def prepare(self, num_workers: int) -> dict[str, Any]:
        """Open the rendezvous; returns what the workers' `open_receiver` needs, as JSON values:
        `transport` is this one's name."""
        ...

    def join(self) -> None:
        """Wait until the group is complete."""
        ...

    def send(self, buffer: torch.Tensor) -> None:
        """Send one packed buffer (uint8); returns when its memory may be reused."""
        ...

    def close(self) -> None:
        """Leave the group. A `join` or `send` in another thread fails soon after. May be called twice."""
        ...


class Receiver(Protocol):
    """A worker's end of the group. `receive` raises RuntimeError if the trainer is gone or too slow."""

    def receive(self, num_bytes: int) -> torch.Tensor:
        """The next packed buffer (uint8), complete."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


@dataclass(frozen=True)
class SenderOptions:
    """How to open a sender.

    Attributes:
        transport: one of `TRANSPORTS`.
        address: address of this machine at which the workers reach the trainer.
        port: TCP port of the rendezvous; None lets the system choose.
        timeout_s: limit of one operation, where the transport can enforce it.
        device_index: the GPU that buffers are sent from; None: the current one of the calling thread.
    """

    transport: str
    address: str
    port: int | None
    timeout_s: float
    device_index: int | None = None


def open_sender(options: SenderOptions) -> Sender:
    """The trainer's end. ValueError: there is no such transport."""
    if options.transport != CPU_TRANSPORT:
        sender: Sender = _module(options.transport).open_sender(options)
        return sender

    def lead(store: TCPStore, world_size: int) -> GlooGroup:
        return GlooGroup(store, TRAINER_RANK, world_size, options.timeout_s, options.address)

    return GroupSender(options, lead, _CPU)


def open_receiver(details: dict[str, Any], worker: int, device: torch.device) -> Receiver:
    """A worker's end.

    Args:
        details: what the sender's `prepare` returned.
        worker: number of this worker among those of its server, from 0.
        device: of this worker.

    Raises:
        ValueError: there is no such transport.
        RuntimeError: the trainer did not come within its timeout.
    """
    if details.get("transport") != CPU_TRANSPORT:
        receiver: Receiver = _module(str(details.get("transport"))).open_receiver(details, worker, device)
        return receiver
    own_address = local_address(details["master_address"], details["master_port"])
    group = GlooGroup(find_store(details), 1 + worker, details["world_size"], details["timeout_s"], own_address)
    return GroupReceiver(group, _CPU)


def _module(name: str) -> Any:
    if name not in MODULES:
        raise ValueError(f"transport: got {name!r}, expected one of {', '.join(TRANSPORTS)}")
    return importlib.import_module(MODULES[name])


class TransferGroup(Protocol):
    """Ranks that broadcast from rank 0."""

    def broadcast(self, buffer: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class GroupSender:
    """The trainer's end of a transport that broadcasts in a group of ranks over a `TCPStore`.

    Args:
        lead: forms the group as rank 0, given the store and the number of ranks.
        device: where buffers are sent from.
    """

    def __init__(
        self, options: SenderOptions, lead: Callable[[TCPStore, int], TransferGroup], device: torch.device
    ) -> None:
        self._options = options
        self._lead = lead
        self._device = device
        self._world_size = 0
        self._store: TCPStore | None = None
        self._group: TransferGroup | None = None
        self._closed = False

    def prepare(self, num_workers: int) -> dict[str, Any]:
        self._world_size = 1 + num_workers
        options = self._options
        self._store, port = serve_store(options.address, options.port, self._world_size, options.timeout_s)
        return {
            "transport": options.transport,
            "master_address": options.address,
            "master_port": port,
            "world_size": self._world_size,
            "timeout_s": options.timeout_s,
        }

    def join(self) -> None:
        if self._store is None:
            raise RuntimeError(f"{self._options.transport} sender: prepare() comes before join()")
        group = self._lead(self._store, self._world_size)
        self._group = group
        if self._closed:
            group.close()

    def send(self, buffer: torch.Tensor) -> None:
        # Another thread may close the sender meanwhile.
        group = self._group
        if group is None:
            raise RuntimeError(f"{self._options.transport} sender: it is not open")
        group.broadcast(buffer.to(self._device))

    def close(self) -> None:
        self._closed = True
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()


class GroupReceiver:
    """A worker's end of such a transport. Buffers are received on `device`."""

    def __init__(self, group: TransferGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def receive(self, num_bytes: int) -> torch.Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._group.broadcast(buffer)
        return buffer

    def close(self) -> None:
        self._group.close()


class GlooGroup:
    """A group over gloo. When one end closes it, the other end's operation fails at once.

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
        the latest at its timeout: aborting it from here would stop every thread of the process."""
        with self._lock:
            group, self._group = self._group, None
            if self._busy:
                return
        if group is not None:
            group.abort()


def serve_store(address: str, port: int | None, world_size: int, timeout_s: float) -> tuple[TCPStore, int]:
    """A store for `world_size` ranks that listens at `address`, and its port (`port`, if that is free).

    By default a `TCPStore` listens on every interface; a socket of our own listens on the one address that workers use.
    """
    listener = listen(address, port)
    found = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        found,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, found


def find_store(details: Mapping[str, Any]) -> TCPStore:
    """The trainer's store, for a worker. RuntimeError (DistStoreError): it cannot be reached."""
    timeout = timedelta(seconds=details["timeout_s"])
    address, port = details["master_address"], details["master_port"]
    return TCPStore(address, port, details["world_size"], is_master=False, timeout=timeout, wait_for_workers=False)


def listen(address: str, port: int | None) -> socket.socket:
    """A socket that listens at `address`, at `port` if it is free. OSError if this machine does not have the address.

    A broken group may hold its port until a call that is stuck in it ends. A server that joins again must not wait for
    that, so any free port will do.
    """
    if port:
        try:
            return socket.create_server((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            logger.warning("port %d of the weight group is in use: using a free one", port)
    return socket.create_server((address, 0))


def local_address(peer: str, port: int) -> str:
    """This machine's address on the route to `peer` (connecting a datagram socket sends nothing)."""
    family, kind, protocol, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
