"""The trainer's end of weight transfer over gloo; the server's end is `inference.gloo_engine`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipelinerl.weights.gloo_group import GlooGroup
from pipelinerl.weights.meeting_store import serve_store


class GlooTransport:
    """Broadcasts packed buffers to the workers of one server. See `weights.transport` for the protocol."""

    def __init__(self, address: str, port: int | None, timeout_s: float, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._address = address
        self._port = port
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._group: GlooGroup | None = None
        self._world_size = 0
        self._closed = False

    def prepare(self, num_workers: int) -> dict[str, Any]:
        self._world_size = 1 + num_workers
        self._store, port = serve_store(self._address, self._port, self._world_size, self._timeout_s)
        return {
            "master_address": self._address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "timeout_s": self._timeout_s,
            "chunk_bytes": self.chunk_bytes,
        }

    def join(self) -> None:
        if self._store is None:
            raise RuntimeError("gloo transport: prepare() comes before join()")
        group = GlooGroup.lead(self._store, self._address, self._world_size, self._timeout_s)
        self._group = group
        if self._closed:
            group.close()

    def send(self, buffer: torch.Tensor) -> None:
        # Another thread may close the transport meanwhile.
        group = self._group
        if group is None:
            raise RuntimeError("gloo transport: it is not open")
        group.broadcast(buffer.cpu())

    def close(self) -> None:
        self._closed = True
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()
