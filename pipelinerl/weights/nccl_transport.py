"""The trainer's end of vLLM's packed NCCL transfer, for servers on other GPUs than the trainer's.

The workers receive with vLLM's own engine; the group is vLLM's `PyNcclCommunicator` over a TCP rendezvous. NCCL has no
time-out: a call that never returns is left to its thread, and the server is reported as failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipelinerl.weights.meeting_port import listen

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator


class NCCLTransport:
    """Broadcasts packed buffers to the workers of one server. See `weights.transport` for the protocol."""

    def __init__(
        self, address: str, port: int | None, timeout_s: float, chunk_bytes: int, device_index: int | None = None
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._address = address
        self._port = port
        self._timeout_s = timeout_s
        # The current device belongs to a thread: a transport that is made in another one has to be told.
        self._device = torch.device("cuda", torch.cuda.current_device() if device_index is None else device_index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._world_size = 0
        self._communicator: PyNcclCommunicator | None = None
        self._closed = False

    def prepare(self, num_workers: int) -> dict[str, Any]:
        self._world_size = 1 + num_workers
        # The store of vLLM's group listens by itself; it can only be told a port that is free now.
        with listen(self._address, self._port) as listener:
            self._port = int(listener.getsockname()[1])
        return {
            "master_address": self._address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.chunk_bytes,
            # One buffer at a time per side: the sender's chunks arrive in order on one stream.
            "packed_num_buffers": 2,
        }

    def join(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        if self._port is None:
            raise RuntimeError("nccl transport: prepare() comes before join()")
        torch.cuda.set_device(self._device)
        group = StatelessProcessGroup.create(
            self._address, self._port, rank=0, world_size=self._world_size, store_timeout=int(self._timeout_s)
        )
        with unpinned_nccl_env():
            communicator = PyNcclCommunicator(group, device=self._device)
        if communicator.disabled:
            raise RuntimeError("nccl transport: the communicator is disabled here, so nothing could be sent")
        self._communicator = communicator
        if self._closed:
            communicator.destroy()  # type: ignore[no-untyped-call]

    def send(self, buffer: torch.Tensor) -> None:
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("nccl transport: it is not open")
        torch.cuda.set_device(self._device)
        # The buffer was packed by the trainer's thread, on whatever stream and device were current there.
        torch.cuda.synchronize(buffer.device)
        on_device = buffer.to(self._device)
        torch.cuda.synchronize(self._device)
        communicator.broadcast(on_device, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        self._closed = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()  # type: ignore[no-untyped-call]
