"""The trainer's end of weight transfer to a server on the same device; the server's end is `inference.ipc_engine`.

Only handles travel, over a loopback connection of their own (see `weights.handle_channel`); the workers copy the
buffers on the device. For a trainer and a server that share a GPU, where NCCL cannot be used.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from pipelinerl.weights.handle_channel import HandleSender
from pipelinerl.weights.handles import export_buffer, release_buffer


class IPCTransport:
    """Offers packed buffers to the workers of one server. See `weights.transport` for the protocol."""

    def __init__(self, port: int | None, timeout_s: float, chunk_bytes: int, device_index: int | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        self._port = port
        self._timeout_s = timeout_s
        self._device_index = device_index
        self._sender: HandleSender | None = None
        self._num_workers = 0
        self._folder = tempfile.TemporaryDirectory(prefix="pipelinerl-weights-")
        # Held while a buffer lies in the folder, which is taken away only afterwards.
        self._sending = threading.RLock()

    def prepare(self, num_workers: int) -> dict[str, Any]:
        self._num_workers = num_workers
        self._sender = sender = HandleSender(self._port, self._timeout_s)
        return {
            "port": sender.port,
            "secret": sender.secret,
            "timeout_s": self._timeout_s,
            "chunk_bytes": self.chunk_bytes,
        }

    def join(self) -> None:
        if self._sender is None:
            raise RuntimeError("ipc transport: prepare() comes before join()")
        self._sender.accept(self._num_workers)

    def send(self, buffer: torch.Tensor) -> None:
        # Another thread may close the transport meanwhile.
        sender = self._sender
        if sender is None:
            raise RuntimeError("ipc transport: it is not open")
        if buffer.is_cuda:
            if self._device_index is not None:
                # Called in a thread of its own, where another GPU may be current.
                torch.cuda.set_device(self._device_index)
            # Memory of buffers that all readers gave back.
            torch.cuda.ipc_collect()
        with self._sending:
            handle = export_buffer(buffer, Path(self._folder.name))
            try:
                sender.offer(handle)
            finally:
                release_buffer(handle)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            # What is being offered fails now.
            sender.close()
        with self._sending:
            self._folder.cleanup()
