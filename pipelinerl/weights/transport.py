"""How packed buffers get from the trainer to the workers of one server: the two ends, and groups of ranks over gloo (on
CPUs) and NCCL (for servers on other GPUs).

A transport is opened, used for many updates, and closed; after a failure it is closed and a new one is opened.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from pipelinerl.world.jobs import transport_named

logger = logging.getLogger(__name__)

#: Rank of the trainer, the only sender, in a group; workers follow.
TRAINER_RANK = 0
_CPU = torch.device("cpu")
# With it PyTorch starts no watchdog for the group; the watchdog would end the whole process when a broadcast fails.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_PROOF_KEY = "proof"
_HERE_KEY = "here-{rank}"
#: `NCCLGroup.close` waits for NCCL at most this long.
_CLOSE_S = 5.0
_environ_lock = threading.Lock()


class Sender(Protocol):
    """The trainer's end of one server's group. All methods block."""

    def prepare(self, num_workers: int) -> dict[str, Any]:
        """Open the rendezvous; returns what the workers' `open_receiver` needs, as JSON values: `transport` is this
        one's name, `port` or `master_port` where it listens, if it does."""
        ...

    def join(self) -> None:
        """Wait until the group is complete."""
        ...

    def send(self, buffer: torch.Tensor) -> None:
        """Send one packed buffer (uint8); returns when its memory may be reused. Raises RuntimeError or OSError if a
        worker is gone, too slow or could not read it: anything else would end the trainer."""
        ...

    def close(self) -> None:
        """Leave the group. A `join` or `send` in another thread fails soon after. May be called twice."""
        ...


class Receiver(Protocol):
    """A worker's end of the group. `receive` raises RuntimeError if the trainer is gone or too slow, or a buffer cannot
    be read."""

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


class Ends(NamedTuple):
    """What opens the two ends of a transport; see `open_sender` and `open_receiver`."""

    open_sender: Callable[[SenderOptions], Sender]
    open_receiver: Callable[[dict[str, Any], int, torch.device], Receiver]


def open_sender(options: SenderOptions) -> Sender:
    """The trainer's end. ValueError: there is no such transport."""
    return _ends(options.transport).open_sender(options)


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
    return _ends(str(details.get("transport"))).open_receiver(details, worker, device)


def _ends(name: str) -> Ends:
    module, _, attribute = transport_named(name).ends.partition(":")
    ends: Ends = getattr(importlib.import_module(module), attribute)
    return ends


class TransferGroup(Protocol):
    """Ranks that broadcast from rank 0."""

    def broadcast(self, buffer: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class GroupSender:
    """The trainer's end of a transport that broadcasts in a group of ranks over a `TCPStore`.

    Args:
        lead: forms the group, given the store, the rank (0), the number of ranks and the timeout in seconds.
        device: where buffers are sent from.
    """

    def __init__(
        self,
        options: SenderOptions,
        lead: Callable[[TCPStore, int, int, float], TransferGroup],
        device: torch.device,
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
        group = self._lead(self._store, TRAINER_RANK, self._world_size, self._options.timeout_s)
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


class NCCLGroup:
    """A group over NCCL of the trainer and the workers of one server, each with a GPU of its own.

    It is PyTorch's own `ProcessGroupNCCL` over the trainer's `TCPStore`, so both ends use the NCCL that PyTorch brings.
    vLLM's binding asks for functions of newer NCCL releases and, where they are missing, silently skips every
    broadcast. A group is tested before it is used: a number that only the trainer knows has to arrive.

    NCCL itself waits without a limit for ranks that never come, so all ranks meet in the store first, which has a
    timeout. Broadcasts run on a stream of the group, never on the current one: a server that hangs then blocks only its
    own group, not everything else that this process does on the GPU.

    Raises:
        RuntimeError: the other ranks did not come within `timeout_s`, or what the trainer sent did not arrive.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int, timeout_s: float, device: torch.device) -> None:
        # Kept because the store has to outlive the group.
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._lock = threading.Lock()
        # What a broadcast reads or writes. One that failed may run on until NCCL is left; its memory is kept so long.
        self._under_way: torch.Tensor | None = None
        _meet(store, rank, world_size, self._timeout)
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        self._group: Any = _process_group(PrefixStore("weights", store), rank, world_size, self._timeout)
        try:
            self._prove(rank)
        except BaseException:
            self.close()
            raise

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast `buffer` (contiguous, on the group's GPU) from the trainer to the workers, in place.

        Blocks until the buffer may be read or reused on any stream. What wrote it must be complete, or on the current
        stream.

        Raises:
            RuntimeError: a peer went away, the timeout passed, or this group was closed.
        """
        group = self._group
        if group is None:
            raise RuntimeError("nccl group: it was closed")
        if self._under_way is not None:
            raise RuntimeError("nccl group: another broadcast is under way")
        # The current device is one of the thread, and senders are called in threads of their own.
        torch.cuda.set_device(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work = group.broadcast(buffer, TRAINER_RANK, self._timeout)
            self._under_way = buffer
            # Given a time it blocks this thread, and not only the stream.
            work.wait(self._timeout)
        if self._group is not group:
            # A broadcast that is aborted seems to end well.
            raise RuntimeError("nccl group: it was closed during a broadcast")
        if not work.is_completed():
            raise RuntimeError(f"nccl group: a broadcast did not end within {self._timeout.total_seconds():g} s")
        self._stream.synchronize()
        self._under_way = None

    def close(self) -> None:
        """Leave the group; a broadcast of another thread fails soon after. May be called twice; raises nothing.

        Waits for NCCL a few seconds at most: the trainer's calls come from the event loop of all servers.
        """
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        thread = threading.Thread(target=_abort, args=(group, self._under_way), name="nccl-abort", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)
        if thread.is_alive():
            logger.warning("nccl group: leaving NCCL takes more than %g s and continues in the background", _CLOSE_S)

    def _prove(self, rank: int) -> None:
        """Broadcast a random number and compare it with the one in the store."""
        value = torch.zeros(1, dtype=torch.int64, device=self._device)
        if rank == TRAINER_RANK:
            number = secrets.randbits(62) + 1
            self._store.set(_PROOF_KEY, str(number))
            value.fill_(number)
        self.broadcast(value)
        arrived, expected = int(value), int(self._store.get(_PROOF_KEY))
        if arrived != expected:
            raise RuntimeError(
                f"nccl group: {arrived} arrived where {expected} was sent: NCCL does not carry data here. "
                "Run with NCCL_DEBUG=INFO to see why."
            )


def _place(details: dict[str, Any], worker: int) -> tuple[TCPStore, int, int, float]:
    """Store, rank, number of ranks and timeout of a worker in its group."""
    return find_store(details), 1 + worker, details["world_size"], details["timeout_s"]


def _gloo_sender(options: SenderOptions) -> Sender:
    return GroupSender(options, partial(GlooGroup, address=options.address), _CPU)


def _gloo_receiver(details: dict[str, Any], worker: int, device: torch.device) -> Receiver:
    own_address = local_address(details["master_address"], details["master_port"])
    return GroupReceiver(GlooGroup(*_place(details, worker), own_address), _CPU)


def _nccl_sender(options: SenderOptions) -> Sender:
    device = _gpu(options.device_index)
    return GroupSender(options, partial(NCCLGroup, device=device), device)


def _nccl_receiver(details: dict[str, Any], worker: int, device: torch.device) -> Receiver:
    own = _gpu(device.index)
    return GroupReceiver(NCCLGroup(*_place(details, worker), own), own)


def _gpu(index: int | None) -> torch.device:
    """The GPU with this index; None: the current one."""
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


GLOO, NCCL = Ends(_gloo_sender, _gloo_receiver), Ends(_nccl_sender, _nccl_receiver)


def _meet(store: TCPStore, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks are at this point. RuntimeError: some did not come within `timeout`."""
    store.set(_HERE_KEY.format(rank=rank), "1")
    keys = [_HERE_KEY.format(rank=other) for other in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"nccl group: rank {rank} of {world_size} waited {timeout.total_seconds():g} s for the others: {error}"
        ) from error


def _abort(group: Any, _kept: torch.Tensor | None) -> None:
    try:
        group.abort()
    except RuntimeError:
        # Whoever closes a group has an error already, or no use for the group any more.
        logger.exception("nccl group: NCCL could not leave it cleanly")


def _process_group(store: PrefixStore, rank: int, world_size: int, timeout: timedelta) -> Any:
    # PyTorch builds without CUDA have no such class.
    kind: Any = torch.distributed.ProcessGroupNCCL  # type: ignore[attr-defined]
    options = kind.Options()
    options._timeout = timeout
    with _environment(_BLOCKING_WAIT, "1"):
        return kind(store, rank, world_size, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable only while a constructor reads it: other groups of this process keep their own settings."""
    with _environ_lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


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
