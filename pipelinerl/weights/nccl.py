"""Weight transfer over NCCL, for servers on other GPUs.

The group is PyTorch's own `ProcessGroupNCCL` over the trainer's `TCPStore`, so it uses the NCCL that PyTorch brings at
both ends. vLLM's binding asks for functions of newer NCCL releases and, where they are missing, silently skips every
broadcast. A group is tested before it is used: a number that only the trainer knows has to arrive.

NCCL itself waits without a limit for ranks that never come, so all ranks meet in the store first, which has a timeout.
Broadcasts run on a stream of the group, never on the current one: a server that hangs then blocks only its own group,
not everything else that this process does on the GPU.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pipelinerl.weights.transport import TRAINER_RANK, GroupReceiver, GroupSender, SenderOptions, find_store

# With it PyTorch starts no watchdog for the group; the watchdog would end the whole process when a broadcast fails.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_PROOF_KEY = "proof"
_HERE_KEY = "here-{rank}"
#: `close` waits for NCCL at most this long.
_CLOSE_S = 5.0
_environ_lock = threading.Lock()
logger = logging.getLogger(__name__)


def open_sender(options: SenderOptions) -> GroupSender:
    index = torch.cuda.current_device() if options.device_index is None else options.device_index
    device = torch.device("cuda", index)

    def lead(store: TCPStore, world_size: int) -> NCCLGroup:
        return NCCLGroup(store, TRAINER_RANK, world_size, options.timeout_s, device)

    return GroupSender(options, lead, device)


def open_receiver(details: dict[str, Any], worker: int, device: torch.device) -> GroupReceiver:
    own = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    group = NCCLGroup(find_store(details), 1 + worker, details["world_size"], details["timeout_s"], own)
    return GroupReceiver(group, own)


class NCCLGroup:
    """A group of the trainer and the workers of one server, each with a GPU of its own.

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
